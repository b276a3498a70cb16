"""Environments of engines' processes."""

import pytest
import torch

from forge_rl.engines import factory
from forge_rl.engines.factory import decode_environment, thread_environment


@pytest.mark.parametrize(("sharers", "threads"), [(1, "4"), (2, "2"), (3, "1"), (9, "1")])
def test_processes_share_the_cores(sharers: int, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "cpu_cores", lambda: 4)
    assert thread_environment(sharers)["OMP_NUM_THREADS"] == threads


def test_threads_that_wait_leave_their_core() -> None:
    for env in (thread_environment(1), decode_environment(0, replicas=1)):
        assert env["OMP_WAIT_POLICY"] == "PASSIVE"
        assert 0 < int(env["GOMP_SPINCOUNT"]) < 1000, "libgomp's own are milliseconds"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA vLLM compiles")
def test_an_engine_on_cpu_compiles_nothing_at_its_first_request() -> None:
    assert decode_environment(0, replicas=1)["TORCH_COMPILE_DISABLE"] == "1"
