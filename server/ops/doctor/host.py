"""The machine without its GPUs: Python and packages, memory, NUMA, limits, the port."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import shutil
import socket

import server
from server.ops.doctor.finding import Finding, Machine, Subject, fail, gib, ok, warn

_PACKAGES = ("llama-cpp-python", "fastapi", "uvicorn", "pydantic", "msgspec", "numpy", "jinja2")
_FILES = 4096  # a connection each, and files beside
_SHM_BYTES = 1 << 30


def check_python() -> list[Finding]:
    return [
        ok(
            "python",
            f"Python {platform.python_version()}, glmserve {server.__version__}, {platform.platform(terse=True)}",
        )
    ]


def check_packages() -> list[Finding]:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return [fail("packages", f"not installed: {', '.join(missing)}", "run `make install` again")]
    return [ok("packages", ", ".join(found))]


def check_memory(machine: Machine, subject: Subject) -> list[Finding]:
    total, free = _meminfo(machine, "MemTotal"), _meminfo(machine, "MemAvailable")
    if total is None or free is None:
        return [warn("memory", "how much there is cannot be read", "mount /proc")]
    limit = machine.text("sys/fs/cgroup/memory.max")
    limited = int(limit) if limit and limit.isdigit() else None
    found = f"{gib(free)} of {gib(total)} available"
    if limited is not None and limited < total:
        found += f", and this container or service may use {gib(limited)}"
    findings = [ok("memory", found)]
    swap = _meminfo(machine, "SwapTotal")
    if swap and not subject.locks_memory and machine.text("proc/sys/vm/swappiness") not in (None, "0", "1"):
        findings.append(
            warn(
                "swap",
                f"{gib(swap)} of swap: weights that the CPU computes may move there, and a token takes seconds then",
                "swapoff -a, or --load-mode mlock (with LimitMEMLOCK=infinity)",
            )
        )
    return findings


def _meminfo(machine: Machine, key: str) -> int | None:
    for line in (machine.text("proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    return None


def check_numa(machine: Machine, subject: Subject) -> list[Finding]:
    nodes = sorted((machine.root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return [ok("numa", "one node: memory is equally near to all processors")]
    found = f"{len(nodes)} nodes"
    if subject.numa is None and not subject.gpu_flag:
        return [
            warn(
                "numa",
                f"{found}, and --numa is not given: where the CPU computes, half of its memory is far away",
                "--numa distribute, where experts or all layers are computed by the CPU; no matter on GPUs alone",
            )
        ]
    if machine.text("proc/sys/kernel/numa_balancing") == "1" and subject.numa is not None:
        return [
            warn(
                "numa",
                f"{found}, and the kernel moves pages between them while the server computes",
                "echo 0 > /proc/sys/kernel/numa_balancing",
            )
        ]
    return [ok("numa", found)]


def check_shm(machine: Machine) -> list[Finding]:
    try:
        free = shutil.disk_usage(machine.root / "dev/shm").free
    except OSError:
        return [warn("shm", "there is no /dev/shm", "mount a tmpfs there; several GPUs may need it")]
    if free < _SHM_BYTES:
        return [
            warn(
                "shm",
                f"/dev/shm has {gib(free)} free; CUDA's libraries for several GPUs use it",
                "docker run --shm-size 1g (or --ipc=host); elsewhere: mount -o remount,size=1g /dev/shm",
            )
        ]
    return [ok("shm", f"/dev/shm has {gib(free)} free")]


def check_limits(subject: Subject) -> list[Finding]:
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = []
    if 0 <= files < _FILES:
        at_most = "" if hard == resource.RLIM_INFINITY or hard >= _FILES else f" (the hard limit is {hard})"
        findings.append(
            warn(
                "open files",
                f"at most {files}{at_most}: connections beyond that are refused",
                f"LimitNOFILE=65536 in the systemd unit, docker run --ulimit nofile=65536, or ulimit -n {_FILES}",
            )
        )
    else:
        findings.append(ok("open files", f"at most {'any number' if files < 0 else files}"))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if subject.locks_memory and locked != resource.RLIM_INFINITY:
        findings.append(
            fail(
                "locked memory",
                f"--load-mode mlock is asked for, but only {gib(locked)} may be locked",
                "LimitMEMLOCK=infinity in the systemd unit, docker run --ulimit memlock=-1, or another --load-mode",
            )
        )
    return findings


def check_port(subject: Subject) -> list[Finding]:
    findings = []
    for host in subject.hosts:
        if host.endswith(".sock"):
            continue
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, subject.port))
        except OSError as error:
            findings.append(
                fail(
                    "port",
                    f"{host} port {subject.port} cannot be bound: {error.strerror or error}",
                    "stop what listens there (ss -ltnp), or choose another --host or --port",
                )
            )
        else:
            findings.append(ok("port", f"{host} port {subject.port} is free"))
    return findings
