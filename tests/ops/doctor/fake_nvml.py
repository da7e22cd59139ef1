"""A stand-in for the module pynvml: two GPUs of a driver, or its troubles."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace


class NVMLError(Exception):
    pass


@dataclass
class FakeNvml:
    """`free_gib` has an entry for each GPU."""

    driver: str = "580.65.06"
    cuda: int = 13000
    free_gib: tuple[float, ...] = (79.0, 79.0)
    persistent: bool = True
    trouble: str | None = None
    calls: list[str] = field(default_factory=list)
    NVMLError: type[NVMLError] = NVMLError

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's names)
        self.calls.append("init")
        if self.trouble:
            raise NVMLError(self.trouble)

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls.append("shutdown")

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802 (bytes in older versions)
        return self.driver.encode()

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.free_gib)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA A100-SXM4-80GB"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(free=int(self.free_gib[handle] * 2**30), total=80 * 2**30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return 8, 0

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:  # noqa: N802
        return int(self.persistent)
