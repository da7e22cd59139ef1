#!/usr/bin/env python3
"""Write tests/fit/dry_runs.json: what llama.cpp's dry runs say about GLM shapes on devices that plan like CUDA's.

    python scripts/measure_dry_runs.py --llama-cpp DIR

DIR is the llama.cpp tree that the installed llama-cpp-python was built from: scripts/fake_devices.cpp is compiled
against its headers (g++, two seconds) and loaded as a backend. Run it after each change of llama.cpp: tests/fit holds
the plans to the table. From the project's root.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from server.fit.choice import ContextChoice  # noqa: E402
from server.fit.probe import dry_run  # noqa: E402
from tests.support.dry_runs import TABLE, Case  # noqa: E402
from tests.support.shapes import write_shape  # noqa: E402

NOT_PIPELINED = {"tensor_overrides": [{"pattern": "^matches-nothing$", "buffer": "CPU"}]}
COUNTS = {
    "glm-5.2": [10] * 8,
    "glm-5.1": [10] * 8,
    "glm-4.6": [12] * 7 + [10],
    "glm-4.5-air": [6] * 8,
    "glm-4.7-flash": [6] * 8,
}
BLOCKS = {"glm-5.2": 80, "glm-5.1": 80, "glm-4.6": 94, "glm-4.5-air": 48, "glm-4.7-flash": 48}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the table that tests/fit compares plans with.")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="the llama.cpp tree of the installed bindings")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = build(given.llama_cpp / "ggml", Path(folder))
        cases = list(cases_of_one_device(Path(folder), library)) + list(cases_of_eight(Path(folder), library))
    lines = ",\n".join(json.dumps(case.row(), separators=(",", ":")) for case in cases)
    TABLE.write_text(f"[\n{lines}\n]\n")
    print(f"{len(cases)} cases in {TABLE.relative_to(ROOT)}")


def build(ggml: Path, folder: Path) -> Path:
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    base = Path(spec.origin).parent / "lib" / "libggml-base.so.0"
    library = folder / "libggml-fake.so"
    flags = ["-std=gnu++17", "-O1", "-fPIC", "-shared"]
    defines = [f"-DGGML_{name}" for name in ("BACKEND_DL", "BACKEND_BUILD", "BACKEND_SHARED", "SHARED")]
    includes = [f"-I{ggml / 'include'}", f"-I{ggml / 'src'}"]
    source = ROOT / "scripts" / "fake_devices.cpp"
    subprocess.run(["g++", *flags, *defines, *includes, str(source), str(base), "-o", str(library)], check=True)
    return library


def cases_of_one_device(folder: Path, library: Path):
    cells, types = (8192, 131_072, 1_048_576), ("f16", "q8_0")
    grid = itertools.product(cells, (512, 2048, 8192), ((1, True), (2, False)), types)
    choices = [choice(n_ctx, n_ubatch, *slots, type_) for n_ctx, n_ubatch, slots, type_ in grid]
    choices += [choice(n_ctx, 512, 4, unified, "q8_0") for n_ctx in cells for unified in (True, False)]
    yield from measure(folder, library, "glm-5.2", [BLOCKS["glm-5.2"]], choices)
    few = itertools.product((8192, 131_072), (512, 4096), ((1, True, "f16"), (3, False, "q8_0")))
    choices = [choice(n_ctx, n_ubatch, *rest) for n_ctx, n_ubatch, rest in few]
    for model in ("glm-5.1", "glm-4.6", "glm-4.5-air", "glm-4.7-flash"):
        yield from measure(folder, library, model, [BLOCKS[model]], choices)


def cases_of_eight(folder: Path, library: Path):
    grid = itertools.product((131_072, 1_048_576), (512, 8192), (1, 2))
    choices = [choice(*each, False, "q8_0") for each in grid]
    for model in ("glm-5.2", "glm-4.6", "glm-4.7-flash"):
        for pipelined in (True, False):
            few = choices if model == "glm-5.2" else choices[::3]
            yield from measure(folder, library, model, COUNTS[model], few, pipelined=pipelined)
    drafting = [choice(131_072, 512, 2, False, "q8_0"), choice(65_536, 2048, 4, True, "f16")]
    for model in ("glm-5.2", "glm-4.6"):
        yield from measure(folder, library, model, COUNTS[model], drafting, pipelined=True, draft=True)
    apart = [choice(131_072, 512, 2, False, "q8_0"), choice(32_768, 2048, 1, True, "f16")]
    for model, counts in (("glm-5.2", [78]), ("glm-5.2", [20, 20]), ("glm-4.6", [40]), ("glm-4.7-flash", [10, 10])):
        yield from measure(folder, library, model, counts, apart, n_on_host=BLOCKS[model] - sum(counts))
    for model, counts in (("glm-5.2", [80]), ("glm-4.6", [94]), ("glm-4.7-flash", [24, 24])):
        yield from measure(folder, library, model, counts, apart, offload_kqv=False)
    for model, n_apart in (("glm-5.2", 79), ("glm-5.2", 40), ("glm-4.6", 20)):
        yield from measure(folder, library, model, COUNTS[model], apart, n_apart=n_apart)


def choice(n_ctx: int, n_ubatch: int, n_slots: int, unified: bool, type_: str) -> ContextChoice:
    return ContextChoice(
        n_ctx=n_ctx,
        n_slots=n_slots,
        kv_unified=unified,
        n_batch=8192,
        n_ubatch=n_ubatch,
        cache_type_k=type_,
        cache_type_v=type_,
    )


def measure(
    folder, library, model, counts, choices, *, pipelined=False, draft=False, n_apart=0, n_on_host=0, offload_kqv=True
):
    options = {
        "path": str(write_shape(folder, model)),
        "tensor_split": counts,
        "n_gpu_layers": sum(counts),
        "n_cpu_moe": n_apart,
        "offload_kqv": offload_kqv,
        "use_extra_bufts": False,
    }
    if not pipelined and offload_kqv and len(counts) > 1:
        options |= NOT_PIPELINED
    environment = {"FAKE_DEVICES": str(len(counts))}
    names = [f"FAKE{index}" for index in range(len(counts))]
    runs = dry_run(options, choices, draft=draft, backends=[str(library)], environment=environment)
    for each, run in zip(choices, runs, strict=True):
        if run.error or run.pipelined is not pipelined or not run.exact:
            sys.exit(f"{model} {each}: {run}")
        yield Case(
            model=model,
            counts=tuple(counts),
            pipelined=pipelined,
            draft=draft,
            n_apart=n_apart,
            n_on_host=n_on_host,
            offload_kqv=offload_kqv,
            n_ctx=each.n_ctx,
            n_slots=each.n_slots,
            unified=each.kv_unified,
            n_ubatch=each.n_ubatch,
            cache_type=each.cache_type_k,
            cache=sum(buffer.context for buffer in run.buffers),
            compute=run.compute(names),
        )


if __name__ == "__main__":
    main()
