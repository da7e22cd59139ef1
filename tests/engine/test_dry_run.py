"""The dry run from the inside: what a library tells that does not show its map, and what it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from server.engine import dry_run
from server.engine.dry_run import DryContext, DryRequest, run
from server.engine.options import ModelOptions
from server.store.source import tiny_glm_model

OPTIONS = ModelOptions(path=str(tiny_glm_model()), n_ctx=32_768, n_slots=2, n_gpu_layers=0, use_extra_bufts=False)


def test_the_log_tells_the_same_rounded_where_the_map_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    request = DryRequest(OPTIONS, (DryContext(), DryContext(n_ctx=1 << 20, kv_unified=False)))
    exact = run(request).contexts
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    rounded = run(request).contexts
    for right, near in zip(exact, rounded, strict=True):
        assert (right.exact, near.exact) == (True, False)
        assert (right.n_ctx, right.n_ctx_seq) == (near.n_ctx, near.n_ctx_seq)
        for part in ("context", "compute"):
            told = sum(getattr(buffer, part) for buffer in right.buffers)
            assert sum(getattr(buffer, part) for buffer in near.buffers) == pytest.approx(told, abs=2 * 10_486)


def test_what_a_context_says_beats_the_options() -> None:
    first, second, refused = run(
        DryRequest(OPTIONS, (DryContext(), DryContext(n_ctx=8192, n_slots=3, n_seq_max=40), DryContext(n_seq_max=300)))
    ).contexts
    assert (first.n_ctx, second.n_ctx) == (32_768, 8192)
    assert "n_seq_max must be <= 256" in refused.error
    assert refused.buffers == ()


def test_the_program_answers_in_json_and_names_what_is_wrong() -> None:
    request = {"model": {"path": "/nowhere.gguf"}, "contexts": [{}]}
    done = subprocess.run(
        [sys.executable, "-m", "server.engine.dry_run"],
        input=json.dumps(request).encode(),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        check=True,
    )
    assert "cannot read '/nowhere.gguf'" in json.loads(done.stdout)["error"]
    assert dry_run.DryReport().error == ""
