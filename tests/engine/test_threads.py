from __future__ import annotations

import os

import pytest

from server.engine.options import ModelOptions
from server.engine.threads import default_threads, n_allowed_cpus, openmp_environment


def test_threads_that_take_every_cpu_are_bound() -> None:
    n = n_allowed_cpus()
    assert openmp_environment(ModelOptions("m", n_threads=n))["OMP_PROC_BIND"] == "true"
    assert openmp_environment(ModelOptions("m", n_threads=1, n_threads_batch=n))["OMP_PROC_BIND"] == "true"


def test_threads_that_leave_a_cpu_free_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.engine.threads.n_allowed_cpus", lambda: 8)
    assert "OMP_PROC_BIND" not in openmp_environment(ModelOptions("m", n_threads=7))


def test_the_default_fits_the_cpus_this_process_may_use() -> None:
    assert 1 <= default_threads() <= n_allowed_cpus() <= (os.cpu_count() or 1)
