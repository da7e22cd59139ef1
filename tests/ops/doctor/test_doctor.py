"""What the doctor says of machines that are not here: drivers, GPUs, limits, files, all invented; and of this one."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest

from server.cli import main
from server.cli.command import read_settings
from server.cli.commands.doctor import subject_of
from server.ops.doctor import host
from server.ops.doctor.examine import as_json, examine, lines
from server.ops.doctor.finding import Answer, Finding, Machine, Subject, Verdict, run
from server.ops.doctor.gpus import check_gpus, check_llama, find_backend
from server.ops.doctor.model import check_model, read_speed
from tests.ops.doctor.fake_nvml import FakeNvml

CPU = "CPU: a processor (1 of 2 MiB free)\n"
GPUS = "CUDA0: A100 (1 of 2 MiB free)\nCUDA1: A100 (1 of 2 MiB free)\n" + CPU


def machine(
    root: Path,
    nvml: FakeNvml | None = None,
    *,
    devices: str = CPU,
    cuda: int | None = 13,
    load_error: str = "",
    environment: dict[str, str] | None = None,
) -> Machine:
    """`devices`: what --list-devices prints; `cuda`: the version of llama.cpp's CUDA library, None: it has none."""
    libraries = root / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    if cuda is not None:
        (libraries / "libggml-cuda.so").write_bytes(b"\x7fELF\0" + f"libcudart.so.{cuda}\0".encode())

    def answers(command: list[str]) -> Answer:
        if "--list-devices" in command:
            return Answer(0, "", devices)
        return Answer(1, "", f"OSError: {load_error}") if load_error else Answer(0, "", "")

    return Machine(root, {"LLAMA_CPP_LIB_PATH": str(libraries), **(environment or {})}, nvml, answers)


def worst(findings: list[Finding]) -> Finding:
    order = [Verdict.OK, Verdict.WARN, Verdict.FAIL]
    return max(findings, key=lambda finding: order.index(finding.verdict))


def test_gpus_that_are_all_used_are_well(tmp_path: Path) -> None:
    nvml = FakeNvml()
    findings = check_gpus(machine(tmp_path, nvml, devices=GPUS), Subject())
    assert worst(findings).verdict is Verdict.OK
    assert [finding.check for finding in findings] == ["gpu driver", "gpu 0", "gpu 1", "llama.cpp"]
    assert "driver 580.65.06, which knows CUDA 13.0; llama.cpp was built for CUDA 13" in findings[0].found
    assert "79.0 GiB of 80.0 GiB free" in findings[1].found
    assert nvml.calls == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("nvml", "changes", "cause", "way_out"),
    [
        (FakeNvml(), {"cuda": None}, "it was built without CUDA", "GLMSERVE_CUDA=on"),
        (FakeNvml(driver="535.1", cuda=12020), {}, "built for CUDA 13, and the driver knows CUDA 12.2", "580 or newer"),
        (FakeNvml(), {"load_error": "libcublas.so.13: cannot open"}, "(libcublas.so.13: cannot open)", "nvidia-cublas"),
        (FakeNvml(), {"environment": {"CUDA_VISIBLE_DEVICES": ""}}, "CUDA_VISIBLE_DEVICES is ''", "unset"),
        (FakeNvml(), {}, "CUDA does not start", "dmesg"),
    ],
)
def test_gpus_that_llama_cpp_does_not_see_are_a_fault_with_a_cause(
    nvml: FakeNvml, changes: dict[str, object], cause: str, way_out: str, tmp_path: Path
) -> None:
    here = machine(tmp_path, nvml, **changes)  # type: ignore[arg-type]
    finding = check_gpus(here, Subject())[-1]
    assert finding.verdict is Verdict.FAIL
    assert "there are 2 GPUs, but llama.cpp sees only CPU" in finding.found
    assert cause in finding.found
    assert way_out in finding.way_out
    assert check_gpus(here, Subject(no_gpus=True))[-1].verdict is Verdict.OK  # it was said on the command line


def test_a_driver_that_is_too_old_is_said_first(tmp_path: Path) -> None:
    finding = check_gpus(machine(tmp_path, FakeNvml(driver="535.1", cuda=12020)), Subject())[0]
    assert (finding.check, finding.verdict) == ("gpu driver", Verdict.FAIL)
    assert finding.way_out == "update the driver to 580 or newer, or build for CUDA 12"


def test_a_gpu_that_somebody_uses_and_a_driver_that_sleeps_are_told(tmp_path: Path) -> None:
    nvml = FakeNvml(free_gib=(79.0, 12.0), persistent=False)
    found = {each.check: each for each in check_gpus(machine(tmp_path, nvml, devices=GPUS), Subject())}
    assert found["gpu 1"].verdict is Verdict.WARN
    assert "something else uses it" in found["gpu 1"].found
    assert "nvidia-persistenced" in found["gpu persistence"].way_out


@pytest.mark.parametrize("nvml", [None, FakeNvml(trouble="NVML Shared Library Not Found"), FakeNvml(free_gib=())])
def test_no_gpu_is_well_unless_one_is_asked_for(nvml: FakeNvml | None, tmp_path: Path) -> None:
    here = machine(tmp_path, nvml)
    assert [finding.verdict for finding in check_gpus(here, Subject())] == [Verdict.OK]
    (finding,) = check_gpus(here, Subject(gpu_flag="--n-gpu-layers"))
    assert finding.verdict is Verdict.FAIL
    assert "--n-gpu-layers asks for GPUs" in finding.found
    assert "install the driver" in finding.way_out
    (tmp_path / ".dockerenv").touch()
    assert "--gpus all" in check_gpus(here, Subject(gpu_flag="--n-gpu-layers"))[0].way_out


def test_devices_without_a_driver_that_answers_are_a_fault(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (finding,) = check_gpus(machine(tmp_path, FakeNvml(trouble="Driver/library version mismatch")), Subject())
    assert finding.verdict is Verdict.FAIL
    assert "Driver/library version mismatch" in finding.found


def test_a_llama_cpp_that_does_not_start_is_a_fault(tmp_path: Path) -> None:
    here = Machine(tmp_path, {}, None, lambda command: Answer(4, "", "x\nerror: libllama.so cannot be loaded\n"))
    (finding,) = check_llama(here, Subject())
    assert (finding.verdict, finding.found) == (Verdict.FAIL, "it does not start: libllama.so cannot be loaded")
    assert finding.way_out == "run `make install` again"
    said = "error: libllama.so cannot be loaded: libcuda.so.1 is missing; start it with --gpus all\n"
    (finding,) = check_llama(Machine(tmp_path, {}, None, lambda command: Answer(4, "", said)), Subject())
    assert finding.found == "it does not start: libllama.so cannot be loaded: libcuda.so.1 is missing"
    assert finding.way_out == "start it with --gpus all"


def test_the_cuda_library_is_found_beside_llama_cpps_own(tmp_path: Path) -> None:
    assert find_backend(machine(tmp_path, cuda=None)) is None
    backend = find_backend(machine(tmp_path, cuda=12))
    assert backend is not None
    assert backend.cuda == 12


def meminfo(root: Path, swap_kib: int = 0) -> None:
    (root / "proc/sys/vm").mkdir(parents=True, exist_ok=True)
    text = f"MemTotal: {8 << 20} kB\nMemAvailable: {4 << 20} kB\nSwapTotal: {swap_kib} kB\n"
    (root / "proc/meminfo").write_text(text)
    (root / "proc/sys/vm/swappiness").write_text("60\n")


def test_memory_is_that_of_the_container(tmp_path: Path) -> None:
    meminfo(tmp_path)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{2 << 30}\n")
    (finding,) = host.check_memory(machine(tmp_path), Subject())
    assert finding.found == "4.0 GiB of 8.0 GiB available, and this container or service may use 2.0 GiB"
    meminfo(tmp_path, swap_kib=1 << 20)
    assert "mlock" in host.check_memory(machine(tmp_path), Subject())[1].way_out
    assert len(host.check_memory(machine(tmp_path), Subject(locks_memory=True))) == 1
    assert host.check_memory(machine(tmp_path / "empty"), Subject())[0].verdict is Verdict.WARN


def test_numa_matters_where_the_cpu_computes(tmp_path: Path) -> None:
    here = machine(tmp_path)
    assert host.check_numa(here, Subject())[0].verdict is Verdict.OK
    for node in ("node0", "node1"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    assert "--numa distribute" in host.check_numa(here, Subject())[0].way_out
    assert host.check_numa(here, Subject(gpu_flag="-ngl"))[0].verdict is Verdict.OK
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/numa_balancing").write_text("1\n")
    assert "numa_balancing" in host.check_numa(here, Subject(numa="distribute"))[0].way_out


def test_shared_memory_and_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_shm(machine(tmp_path))[0].verdict is Verdict.WARN
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 2048))
    files, locked = host.check_limits(Subject(locks_memory=True))
    assert (files.verdict, locked.verdict) == (Verdict.WARN, Verdict.FAIL)
    assert "the hard limit is 2048" in files.found
    assert "memlock=-1" in locked.way_out
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [finding.verdict for finding in host.check_limits(Subject(locks_memory=True))] == [Verdict.OK]


def test_a_port_in_use_is_a_fault() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        (finding,) = host.check_port(Subject(port=port))
    assert finding.verdict is Verdict.FAIL
    assert f"port {port} cannot be bound" in finding.found
    (finding,) = host.check_port(Subject(hosts=("127.0.0.1", "/run/x.sock"), port=0))
    assert finding.verdict is Verdict.OK


def test_a_missing_package_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_packages()[0].verdict is Verdict.OK
    monkeypatch.setattr(host, "_PACKAGES", ("numpy", "no-such-package-of-ours"))
    assert host.check_packages()[0].found == "not installed: no-such-package-of-ours"


def test_models_are_looked_at_and_their_disk_measured(tmp_path: Path) -> None:
    model = Path(__file__).parents[3] / "models" / "tiny-glm"
    whole, disk = check_model(Subject(model=str(model)))
    assert "tiny-glm (glm-dsa): 3 files" in whole.found
    assert disk.verdict is Verdict.OK
    (finding,) = check_model(Subject(model="/nowhere/m.gguf"))
    assert (finding.verdict, finding.way_out) == (Verdict.FAIL, "check the path")
    assert check_model(Subject())[0].verdict is Verdict.OK


def test_a_slow_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(__file__).parents[3] / "models" / "tiny-glm"
    monkeypatch.setattr("server.ops.doctor.model.read_speed", lambda path, clock: (16 << 20, 1e7))
    disk = check_model(Subject(model=str(model)))[1]
    assert disk.verdict is Verdict.WARN
    assert "NVMe" in disk.way_out
    path = tmp_path / "file"
    path.write_bytes(bytes(20 << 20))
    ticks = iter(range(100))
    n_bytes, seconds = read_speed(path, lambda: next(ticks) / 10)
    assert n_bytes == 20 << 20
    assert seconds > 0


@pytest.mark.parametrize(
    ("flags", "gpu_flag", "no_gpus"),
    [
        ((), None, False),
        (("-ngl", "all"), "-ngl", False),
        (("-ngl", "0"), None, True),
        (("--device", "none"), None, True),
        (("--device", "CUDA0"), "--device", False),
        (("--tensor-split", "1,1"), "--tensor-split", False),
        (("--split-mode", "tensor"), "--split-mode", False),
    ],
)
def test_what_is_asked_for_is_read_off_the_servers_flags(
    flags: tuple[str, ...], gpu_flag: str | None, no_gpus: bool
) -> None:
    subject = subject_of(read_settings(flags, {}))
    assert (subject.gpu_flag, subject.no_gpus) == (gpu_flag, no_gpus)


def test_findings_are_shown_with_their_way_out(tmp_path: Path) -> None:
    meminfo(tmp_path)
    findings = examine(machine(tmp_path, FakeNvml(), cuda=None), Subject(port=0))
    shown = lines(findings)
    assert any(line.startswith("fail  llama.cpp") for line in shown)
    assert any("→ build it with CUDA" in line for line in shown)
    record = json.loads(as_json(findings))
    assert record["fit"] is False
    assert [each["check"] for each in record["findings"]] == [finding.check for finding in findings]
    with pytest.raises(ValueError, match="way out"):
        Finding("x", Verdict.WARN, "something", "")


def test_programs_that_are_not_there_are_an_answer_too() -> None:
    assert run(["/nowhere/program"]).code == -1


@pytest.mark.e2e
def test_the_command_looks_at_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--port", "0", "--gguf", "models/tiny-glm", "--n-gpu-layers", "0"])
    record = json.loads(capsys.readouterr().out)
    assert {"python", "llama.cpp", "memory", "model", "port"} <= {each["check"] for each in record["findings"]}
    assert code == int(not record["fit"])
