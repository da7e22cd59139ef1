"""What is in a bundle, for those who must know: licences of everything as files, and an SBOM (CycloneDX 1.6, JSON)."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING

from server.store.bundle.bag import Sums, sums_of

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import License

_LICENCE_FILE = re.compile(r"(licen[cs]e|copying|notice|authors|eula|third.?party)[\w.-]*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Package:
    """What a wheel says of itself."""

    name: str
    version: str
    licence: str | None
    wheel: Path


def read_wheel(wheel: Path) -> Package:
    """Raises ValueError for a wheel without metadata."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
                head = HeaderParser().parsestr(archive.read(name).decode("utf-8", errors="replace"))
                return Package(head["Name"], head["Version"], head["License-Expression"] or _short(head), wheel)
    raise ValueError(f"'{wheel.name}' has no metadata")


def _short(head: object) -> str | None:
    """The licence's name out of older metadata: a classifier, or a License field that is a name and not a text."""
    get_all = getattr(head, "get_all")  # noqa: B009 (email.message.Message, whose type is no Mapping)
    for classifier in get_all("Classifier") or ():
        if classifier.startswith("License ::"):
            return str(classifier.rsplit(" :: ", 1)[-1])
    for field in get_all("License") or ():
        if 0 < len(field) <= 60 and "\n" not in field:
            return str(field)
    return None


def _is_runtime(name: str) -> bool:
    """A library of the compiler that portable builds carry (scripts/portable.cmake)."""
    return re.search(r"/lib(gomp|stdc\+\+|gcc_s)\.so\.\d+$", name) is not None


_RUNTIME = """\
libgomp.so.1, libstdc++.so.6 and libgcc_s.so.1 in the wheel of llama-cpp-python are GCC's runtime libraries, unchanged
from the system that built it. Licence: GPL-3.0-or-later WITH GCC-exception-3.1, which allows programs under any licence
to be passed on together with them. Their sources are those of GCC, from the distributor of that system.
"""


def copy_licences(wheels: Iterable[Path], to: Path) -> None:
    """The licence files of each wheel, in a folder with the wheel's name."""
    for wheel in wheels:
        folder = to / "-".join(wheel.name.split("-")[:2])
        with zipfile.ZipFile(wheel) as archive:
            if any(map(_is_runtime, archive.namelist())):
                (to / "gcc-runtime").mkdir(parents=True, exist_ok=True)
                (to / "gcc-runtime" / "NOTICE").write_text(_RUNTIME, encoding="utf-8")
            for name in archive.namelist():
                inside = re.match(r"[^/]+\.dist-info/(?:licenses/)?(.+)$", name)
                if inside and not name.endswith("/") and ("/licenses/" in name or _LICENCE_FILE.search(name)):
                    target = folder / inside[1].replace("..", "_")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))


def write_sbom(
    to: Path, name: str, made_with: str, packages: Iterable[Package], model: dict[str, Sums], model_licence: str | None
) -> None:
    """`model`: the shards by file name."""
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.contact import OrganizationalEntity
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    bom = Bom()
    root = Component(
        name=name, type=ComponentType.APPLICATION, version=made_with, supplier=OrganizationalEntity(name="glmserve")
    )
    bom.metadata.component = root
    components = []
    for package in packages:
        sha256 = sums_of(package.wheel, blocks=False).sha256
        purl_name = re.sub(r"[-_.]+", "-", package.name).lower()
        components.append(
            Component(
                name=package.name,
                version=package.version,
                type=ComponentType.LIBRARY,
                purl=PackageURL("pypi", None, purl_name, package.version),
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)],
                licenses=_licences(package.licence),
                bom_ref=f"{purl_name}=={package.version}",
            )
        )
        components += _runtime_components(package.wheel)
    for file, sums in model.items():
        components.append(
            Component(
                name=file,
                type=ComponentType.MACHINE_LEARNING_MODEL,
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sums.sha256)],
                licenses=_licences(model_licence),
                bom_ref=f"model/{file}",
            )
        )
    for component in components:
        bom.components.add(component)
    bom.register_dependency(root, components)
    to.write_text(JsonV1Dot6(bom).output_as_string(indent=1) + "\n", encoding="utf-8", newline="\n")


def _runtime_components(wheel: Path) -> list[Component]:
    import hashlib

    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentType

    with zipfile.ZipFile(wheel) as archive:
        return [
            Component(
                name=name.rsplit("/", 1)[-1],
                type=ComponentType.LIBRARY,
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(archive.read(name)).hexdigest())],
                licenses=_licences("GPL-3.0-or-later WITH GCC-exception-3.1"),
                bom_ref=name,
            )
            for name in archive.namelist()
            if _is_runtime(name)
        ]


def _licences(text: str | None) -> list[License]:
    if text is None:
        return []
    from cyclonedx.contrib.license.factories import LicenseFactory

    return [LicenseFactory().make_from_string(text)]
