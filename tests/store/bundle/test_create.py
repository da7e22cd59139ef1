"""Making a bundle and installing it. What comes from the network or a compiler is replaced by small wheels; the rest,
pip and the virtual environment included, is real."""

from __future__ import annotations

import ensurepip
import json
import os
import shutil
import subprocess
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import server
from server.errors import BundleError
from server.store.bundle import create as create_module
from server.store.bundle import transfer, wheels
from server.store.bundle.create import Order, create, parse_target, source_tree
from server.store.bundle.description import Target, read_description, this_machine
from server.store.bundle.install import install, verify
from server.store.bundle.transfer import Way, carry, require_space
from tests.store.bundle.bundles import wheel

SERVER = {"server/__init__.py": "", "server/__main__.py": "print('CPU: a processor')\n"}
PIP = next((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))


def say(line: str) -> None:
    assert line


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    """Two shards and a llama-cpp-python of no use; nothing is fetched or built."""
    model = tmp_path / "model"
    model.mkdir()
    shards = tuple(model / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    for shard in shards:
        shard.write_bytes(os.urandom(1000))
    (model / "LICENSE").write_text("MIT\n")

    def fetch(root: Path, to: Path, target: Target, locks: list[str], told: object) -> None:
        shutil.copyfile(PIP, to / PIP.name)
        wheel(to, "thing", {"thing.py": "x = 1\n"})

    def build_server(root: Path, to: Path) -> None:
        wheel(to, "glmserve", SERVER)

    monkeypatch.setattr(wheels, "fetch_wheels", fetch)
    monkeypatch.setattr(wheels, "build_server_wheel", build_server)
    tag = f"py3-none-linux_{this_machine().machine}"
    llama = wheel(
        tmp_path / "built", "llama_cpp_python", {"llama_cpp/lib/libgomp.so.1": b"\0GLIBC_2.18\0"}, "0.3.36", tag
    )
    return Order("m", shards, 'alias = "m"\n', recipe=None, model_licence="MIT", llama_wheel=llama)


def test_a_bundle_is_made_carried_and_installed(order: Order, tmp_path: Path) -> None:
    made = create(order, tmp_path / "made", say=say)
    assert verify(made).faults == []
    shard = made / "data" / "model" / order.shards[0].name
    assert shard.samefile(order.shards[0])  # no second copy of the model

    carried = Path(shutil.copytree(made, tmp_path / "carried"))
    installed = install(carried, tmp_path / "prefix", say=say)
    settings = tomllib.loads(installed.config.read_text())
    assert settings == {"gguf": str(tmp_path / "prefix" / "model" / order.shards[0].name), "alias": "m"}
    shown = subprocess.run([tmp_path / "prefix" / "start"], capture_output=True, text=True, check=True).stdout
    assert shown == "CPU: a processor\n"
    unit = (tmp_path / "prefix" / "glmserve.service").read_text()
    assert f"ExecStart={tmp_path / 'prefix' / 'start'}\n" in unit
    assert (tmp_path / "prefix" / "licenses" / "model" / "LICENSE").read_text() == "MIT\n"

    installed.config.write_text(installed.config.read_text() + "parallel = 3\n")
    again = install(carried, tmp_path / "prefix", say=say, model_in_place=True)
    assert again.config.read_text().endswith("parallel = 3\n")  # a person's settings stay
    assert again.model == carried / "data" / "model" / order.shards[0].name


def test_the_bundle_says_what_is_in_it(order: Order, tmp_path: Path) -> None:
    made = create(order, tmp_path / "made", say=say)
    description = read_description(made)
    assert description.target == replace(this_machine(), glibc=(2, 18))  # what the wheels need, not what is here
    assert description.model == tuple(shard.name for shard in order.shards)
    sbom = json.loads((made / "data" / "sbom.cdx.json").read_text())
    components = {component["name"]: component for component in sbom["components"]}
    assert set(components) == {*description.model, "glmserve", "llama_cpp_python", "libgomp.so.1", "pip", "thing"}
    assert (made / "data" / "licenses" / "gcc-runtime" / "NOTICE").is_file()
    assert components["thing"]["licenses"][0]["license"]["id"] == "MIT"
    assert components["thing"]["purl"] == "pkg:pypi/thing@1.0"
    assert components[description.model[0]]["type"] == "machine-learning-model"
    assert (made / "data" / "licenses" / "thing-1.0" / "LICENSE").is_file()
    lines = (made / "data" / "wheels" / "requirements.txt").read_text().splitlines()
    assert [line.split("==")[0] for line in lines] == ["glmserve", "llama-cpp-python", "pip", "thing"]
    assert "--prefix" in (made / "README.md").read_text()


def test_a_damaged_bundle_or_one_for_another_machine_is_not_installed(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(order, tmp_path / "made", say=say)
    here = this_machine()
    for target, words in (
        (replace(here, python=(3, 99)), r"run python3\.\d+ install\.py"),
        (replace(here, machine="riscv64"), "this machine is riscv64"),
        (replace(here, glibc=(2, 5)), r"needs glibc 2\.18 or newer, but this system has 2\.5"),
    ):
        monkeypatch.setattr("server.store.bundle.install.this_machine", lambda target=target: target)
        with pytest.raises(BundleError, match=words):
            install(made, tmp_path / "prefix", say=say)
    (made / "data" / "wheels" / "thing-1.0-py3-none-any.whl").write_bytes(b"x")
    with pytest.raises(BundleError, match=r"nothing was installed: data/wheels/thing-1\.0.*is cut short"):
        install(made, tmp_path / "prefix", say=say)
    assert not (tmp_path / "prefix").exists()


def test_a_folder_with_other_things_is_not_installed_into(order: Order, tmp_path: Path) -> None:
    made = create(order, tmp_path / "made", say=say)
    with pytest.raises(BundleError, match="holds other things"):
        install(made, tmp_path, say=say)
    with pytest.raises(BundleError, match="is a file"):
        install(made, order.shards[0], say=say)


def test_nothing_stays_of_a_bundle_that_could_not_be_made(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BundleError, match="wheels need glibc"):
        create(
            replace(order, target=replace(order.target, glibc=(2, 17)), target_is_given=True), tmp_path / "a", say=say
        )
    assert not (tmp_path / "a").exists()
    with pytest.raises(BundleError, match="must be a wheel of llama-cpp-python"):
        create(replace(order, llama_wheel=order.shards[0]), tmp_path / "b", say=say)
    with pytest.raises(BundleError, match="is not empty"):
        create(order, tmp_path, say=say)
    with pytest.raises(BundleError, match="has no CUDA backend"):
        create(replace(order, cuda=("80",)), tmp_path / "c", say=say)

    monkeypatch.setattr(transfer, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(BundleError, match=r"needs .* but only .* are free"):
        create(order, tmp_path / "d", say=say)
    assert not (tmp_path / "d").exists()


def test_a_signed_bundle_holds_with_its_key_only(order: Order, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from server.store.bundle.signature import check

    keys = []
    for name in ("one", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        (tmp_path / f"{name}.pem").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (tmp_path / f"{name}.pub").write_bytes(public)
        keys.append(tmp_path / f"{name}.pub")
    made = create(replace(order, sign_key=tmp_path / "one.pem"), tmp_path / "made", say=say)
    assert verify(made).faults == []  # which writes a file, and the signature holds all the same
    check(made, keys[0])
    with pytest.raises(BundleError, match="does not hold"):
        check(made, keys[1])
    (made / "README.md").write_text("other\n")
    with pytest.raises(BundleError, match="does not hold"):
        check(made, keys[0])
    (made / "bundle.sig").unlink()
    with pytest.raises(BundleError, match="is not signed"):
        check(made, keys[0])


def test_files_are_linked_where_they_can_be(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to(source)
    assert carry(tmp_path / "link", tmp_path / "a" / "one") is Way.LINKED
    assert not (tmp_path / "a" / "one").is_symlink()
    assert carry(source, tmp_path / "two", may_link=False) in (Way.CLONED, Way.COPIED)
    assert not (tmp_path / "two").samefile(source)
    assert transfer.bytes_to_copy([source], tmp_path / "not" / "there") == 0
    assert transfer.bytes_to_copy([source], tmp_path, may_link=False) == 10
    with pytest.raises(BundleError, match="cannot be copied"):
        carry(source, Path("/proc/nowhere/x"), may_link=False)
    require_space(tmp_path, 1, "a test")


@pytest.mark.parametrize(
    ("python", "tag", "expected"),
    [
        ("3.12", "manylinux_2_28_x86_64", Target((3, 12), "x86_64", (2, 28))),
        ("3.11", "manylinux2014_aarch64", Target((3, 11), "aarch64", (2, 17))),
        (None, None, this_machine()),
    ],
)
def test_targets_are_named_as_pip_names_them(python: str | None, tag: str | None, expected: Target) -> None:
    assert parse_target(python, tag) == expected


@pytest.mark.parametrize(("python", "tag"), [("3.9", None), ("4", None), (None, "win_amd64"), (None, "manylinux_2_28")])
def test_wrong_targets_are_refused(python: str | None, tag: str | None) -> None:
    with pytest.raises(BundleError, match=r"--(python|platform) is"):
        parse_target(python, tag)


def test_a_bundle_is_made_in_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (source_tree() / "pyproject.toml").is_file()
    monkeypatch.setattr(server, "__file__", str(tmp_path / "server" / "__init__.py"))
    with pytest.raises(BundleError, match="is made in a clone"):
        source_tree()


def test_tools_of_a_bundle_import_each_other_and_the_standard_library_only() -> None:
    """What `python -I -S install.py` proves by running, for every module and without running it."""
    import ast
    import sys

    for path in create_module.TOOLS:
        tree = ast.parse((source_tree() / path).read_text())
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        outside = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
        assert {f"{name.replace('.', '/')}.py" for name in outside} <= set(create_module.TOOLS), path


def test_the_wheel_of_the_runtime_libraries_is_noticed(tmp_path: Path) -> None:
    path = wheel(
        tmp_path, "x", {"x/lib/libx.so.1": b"..\0GLIBC_2.34\0GLIBC_2.4\0GLIBC_PRIVATE\0", "x/a.py": "GLIBC_2.99"}
    )
    assert wheels.needed_glibc([path]) == (2, 34)
    with zipfile.ZipFile(path) as archive:
        assert "x/lib/libx.so.1" in archive.namelist()
