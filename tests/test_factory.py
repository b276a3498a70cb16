"""Environments of engines' processes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_rl.engines import factory
from forge_rl.engines.cpu import HEAP_ENVIRONMENT
from forge_rl.engines.factory import decode_environment, thread_environment, train_environment
from forge_rl.engines.titan import train
from forge_rl.system.allocator import allocator_environment


@pytest.mark.parametrize(("sharers", "threads"), [(1, "4"), (2, "2"), (3, "1"), (9, "1")])
def test_processes_share_the_cores(sharers: int, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_THREAD_LIMIT", raising=False)
    monkeypatch.setattr(factory, "cpu_cores", lambda: 4)
    assert thread_environment(sharers)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("limit", "threads"), [("1", "1"), (" 3 ", "3"), ("64", "4"), ("", "4"), ("0", "4"), ("x", "4")]
)
def test_no_process_gets_more_threads_than_openmp_may_start(
    limit: str, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
    monkeypatch.setattr(factory, "cpu_cores", lambda: 4)
    for env in (train_environment(1), decode_environment(0, replicas=1), train_environment(2, cores=8)):
        assert env["OMP_NUM_THREADS"] == threads


def test_threads_that_wait_leave_their_core() -> None:
    for env in (thread_environment(1), decode_environment(0, replicas=1)):
        assert env["OMP_WAIT_POLICY"] == "PASSIVE"
        assert 0 < int(env["GOMP_SPINCOUNT"]) < 10000, "libgomp's own are milliseconds"


FREED = """
import torch
from forge_rl.engines import platform

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

platform.available_bytes = lambda: platform.host_bytes()
before = resident()
torch.ones(64 << 20)
large = resident() - before
[torch.ones(2 << 20) for _ in range(32)]
kept = resident() - before
platform.release_memory()
roomy = resident() - before
platform.available_bytes = lambda: 0
platform.release_memory()
print(large >> 20, kept >> 20, roomy >> 20, (resident() - before) >> 20)
"""


def _freed(env: dict[str, str]) -> tuple[int, ...]:
    """Return the MiB that a process with these variables has at the four points of FREED."""
    command = [sys.executable, "-c", FREED]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=True)
    return tuple(map(int, done.stdout.split()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is the GPU's memory that is released there")
def test_a_trainer_keeps_what_it_freed_until_memory_is_short() -> None:
    env = train_environment(1)
    env.pop("LD_PRELOAD", None)
    large, kept_bytes, roomy, short = _freed(env)
    assert large < 50, "one block of 256 MiB would leave a gap"
    assert kept_bytes > 200, "32 blocks of 8 MiB stay in the heap, where the next step takes them"
    assert roomy > 200
    assert short < 50


@pytest.mark.skipif(not allocator_environment(), reason="needs libtcmalloc-minimal4")
@pytest.mark.skipif(torch.cuda.is_available(), reason="it is the GPU's memory that is released there")
def test_tcmalloc_returns_what_a_trainer_freed_once_memory_is_short() -> None:
    _, _, roomy, short = _freed(train_environment(1))
    assert roomy > 200
    assert short < 50


@pytest.mark.parametrize(
    ("preloaded", "expected"),
    [("", "{tcmalloc}"), ("/a.so /b.so", "{tcmalloc}:/a.so /b.so"), ("/x/libjemalloc.so", None)],
)
def test_tcmalloc_is_used_where_it_is_installed_and_no_other_allocator_is_chosen(
    preloaded: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", preloaded)
    folders = [str(tmp_path / "none"), str(tmp_path)]
    assert allocator_environment(folders) == {}
    tcmalloc = tmp_path / "libtcmalloc_minimal.so.4"
    tcmalloc.touch()
    variables = {} if expected is None else {"LD_PRELOAD": expected.format(tcmalloc=tcmalloc)}
    assert allocator_environment(folders) == variables


def test_trainers_on_gpus_keep_their_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEAP_ENVIRONMENT, "LD_PRELOAD", "/libtcmalloc_minimal.so.4")
    monkeypatch.setattr(factory, "device_type", lambda: "cpu")
    assert train_environment(1)["LD_PRELOAD"] == "/libtcmalloc_minimal.so.4"
    monkeypatch.setattr(factory, "device_type", lambda: "cuda")
    assert "LD_PRELOAD" not in train_environment(1)


def test_a_trainer_frees_a_steps_memory_before_engines_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(train, "release_memory", lambda: calls.append("release"))
    monkeypatch.setattr(train, "published_shards", lambda model, ranks: calls.extend([model, ranks]))
    stage = SimpleNamespace(ranks="ranks")
    trainer: Any = SimpleNamespace(onload=lambda: calls.append("onload"), model="model", _stage=stage)
    train.TitanEngine.local_shards(trainer)
    assert calls == ["onload", "release", "model", "ranks"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA vLLM compiles")
def test_an_engine_on_cpu_compiles_nothing_at_its_first_request() -> None:
    assert decode_environment(0, replicas=1)["TORCH_COMPILE_DISABLE"] == "1"


def test_vllm_reads_batch_invariance_before_it_is_imported() -> None:
    assert decode_environment(0, replicas=1, batch_invariant=True)["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in decode_environment(0, replicas=1)


@pytest.mark.parametrize(
    ("visible", "names"), [("", ["0", "1"]), ("4,5", ["4", "5"]), ("GPU-8a1f, MIG-77c2", ["GPU-8a1f", "MIG-77c2"])]
)
def test_an_engine_asks_for_a_gpu_by_its_name_in_the_inherited_list(
    visible: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "device_type", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environments = [decode_environment(place, replicas=2) for place in range(2)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == names
    assert all(env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn" for env in environments)


def test_an_engine_of_several_gpus_has_those_after_its_predecessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "device_type", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,GPU-9")
    gpus = ("2", "3", "4", "5", "6", "GPU-9")
    environments = [decode_environment(place, replicas=3, devices=2, gpus=gpus) for place in range(3)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == ["2,3", "4,5", "6,GPU-9"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workers_of_engines_share_the_cores(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "device_type", lambda: device)
    monkeypatch.setattr(factory, "cpu_cores", lambda: 8)
    assert decode_environment(0, replicas=2, devices=2)["OMP_NUM_THREADS"] == "2"
