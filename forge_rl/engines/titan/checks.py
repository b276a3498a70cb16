"""Checks a host: a training step on what an engine sampled, a matmul on each device, a reduction between hosts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.devices import device_type, gpus
from forge_rl.engines.factory import make_train_engine
from forge_rl.engines.platform import init_distributed
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout
from forge_rl.runtime.host_facts import SampledTokens, TrainStepResult
from forge_rl.types import Batch, Episode, Group, Score, Task, Turn

_ROW = 256
_MATMUL = {"cuda": 8192, "cpu": 1024}
"""Rows of the square matrices, large enough that launching takes no noticeable time."""
_REPEATS = 5


def train_once(model: Path, sampled: SampledTokens) -> TrainStepResult:
    """Load a model into a trainer of one rank, compare its logprobs with the engine's, and make one update.

    Raises:
        ForgeError: the model cannot be loaded or trained.
    """
    init_distributed(0, 1, "127.0.0.1", 0)
    engine = make_train_engine(model, TrainSettings(seq_len=_ROW))
    task = Task(id="check", messages=(), source="check")
    turn = Turn(
        prompt_ids=sampled.prompt_ids,
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        versions=(0,) * len(sampled.token_ids),
        text="",
    )
    group = Group(task=task, episodes=(Episode(task=task, turns=(turn,), score=Score(total=1.0)),))
    batch = Batch(groups=(group,), version=0)
    # As on CUDA, where FlexAttention's blocks are of 128 tokens.
    layout = Layout(seq_len=_ROW, pad_multiple=128, least_tokens=_ROW)
    minibatches = pack(batch, torch.ones(1, 1), layout, drop_uniform=False).minibatches
    start_s = time.perf_counter()
    request = StepRequest(loss=ClippedSurrogate(), total_updates=1, version=0, scored_minibatches=len(minibatches))
    result = engine.train_batch(minibatches, request)
    seconds = time.perf_counter() - start_s
    rows = [row for minibatch in minibatches for row in minibatch.rows]
    gaps = torch.cat(
        [
            (row_scores[:, 0].float().cpu() - row.behaviour).abs()[row.mask]
            for row, row_scores in zip(rows, result.scores, strict=True)
        ]
    )
    return TrainStepResult(
        mean_gap=float(gaps.mean()),
        most_gap=float(gaps.max()),
        finite=None not in result.metrics,
        seconds=seconds,
    )


def matmul_speeds() -> dict[str, float]:
    """Return the FLOP/s of a square matmul on each device of this host, by name: bfloat16 on GPUs, float32 on CPU."""
    kind = device_type()
    if kind == "cpu":
        return {"cpu": _matmul_speed(torch.device("cpu"), torch.float32)}
    return {f"gpu {index}": _matmul_speed(torch.device("cuda", index), torch.bfloat16) for index in range(gpus())}


def _matmul_speed(device: torch.device, dtype: torch.dtype) -> float:
    size = _MATMUL[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def work() -> None:
        torch.matmul(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2.0 * size**3 / _median_s(work)


def all_reduce_rate(rank: int, ranks: int, address: str, port: int, size: int) -> float:
    """Sum a tensor of `size` bytes over one rank on each host; return the bytes that each rank sums per second.

    Raises:
        ConfigError: the ranks cannot meet.
    """
    init_distributed(rank, ranks, address, port)
    try:
        device = torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")
        tensor = torch.ones(size // 4, device=device)

        def work() -> None:
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return size / _median_s(work)
    finally:
        dist.destroy_process_group()


def _median_s(work: Callable[[], None]) -> float:
    # Untimed: the first call allocates and connects.
    work()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
