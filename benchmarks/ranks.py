"""Runs a function on several ranks of one process group, each in its own process."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.ports import unused_port
from benchmarks.report import BenchmarkError
from forge_rl.engines.cpu import HEAP_ENVIRONMENT


def run_ranks(function: Callable[..., object], ranks: int, *args: object, deadline_s: float = 600) -> list[Any]:
    """Run `function(rank, *args)` on each rank and return the results by rank.

    Raises:
        BenchmarkError: a rank failed or died, or they took longer than `deadline_s` seconds.
    """
    # The fork server imports once what takes ten seconds per process, and no torch threads have run in it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forge_rl.engines.titan.train", "benchmarks.layouts"])
    port = unused_port()
    results: Queue[tuple[int, bytes]] = context.Queue()
    processes = [
        context.Process(target=_rank, args=(function, rank, ranks, port, results, args)) for rank in range(ranks)
    ]
    results_by_rank: dict[int, Any] = {}
    until = time.monotonic() + deadline_s
    try:
        with _heap_of_ranks():
            for process in processes:
                process.start()
        while len(results_by_rank) < ranks:
            # Checked before reading the results, as a process that exits now has already put its result.
            codes = [process.exitcode for process in processes]
            try:
                rank, result = results.get(timeout=1)
            except Empty:
                for rank, code in enumerate(codes):
                    if code is not None and rank not in results_by_rank:
                        raise _death(rank, ranks, code) from None
                if time.monotonic() > until:
                    missing = ranks - len(results_by_rank)
                    raise BenchmarkError(f"{missing} of {ranks} ranks were running after {deadline_s:.0f} s") from None
                continue
            results_by_rank[rank] = pickle.loads(result)
            if isinstance(results_by_rank[rank], _Failure):
                # A peer's death first appears as a closed connection.
                for other, process in enumerate(processes):
                    process.join(5)
                    if process.exitcode is not None and process.exitcode < 0:
                        raise _death(other, ranks, process.exitcode)
                raise BenchmarkError(f"rank {rank} of {ranks} failed:\n{results_by_rank[rank]}")
        return [results_by_rank[rank] for rank in range(ranks)]
    finally:
        for process in processes:
            process.join(0 if len(results_by_rank) < ranks else 60)
            process.kill()
            process.join()


@contextlib.contextmanager
def _heap_of_ranks() -> Iterator[None]:
    """Let processes that start in the body, the fork server first, keep freed memory as a trainer's ranks do."""
    before = os.environ.copy()
    os.environ.update(HEAP_ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _death(rank: int, ranks: int, code: int) -> BenchmarkError:
    return BenchmarkError(f"rank {rank} of {ranks} ended with exit code {code}, without a result")


class _Failure(str):
    """Traceback of a rank that raised."""


def _rank(
    function: Callable[..., object],
    rank: int,
    ranks: int,
    port: int,
    results: Queue[tuple[int, bytes]],
    args: Sequence[object],
) -> None:
    from forge_rl.engines.platform import init_distributed
    from forge_rl.runtime.isolation import public_ports

    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(
        logging.ERROR
    )  # hides the hint that two gathers could be one
    try:
        init_distributed(rank, ranks, "127.0.0.1", port)
        assert not public_ports(psutil.Process()), "other machines reach where ranks meet"
        # Pickle tensors by value: a queue would share their memory, which ends with this process.
        results.put((rank, pickle.dumps(function(rank, *args))))
        torch.distributed.destroy_process_group()
    except BaseException:
        results.put((rank, pickle.dumps(_Failure(traceback.format_exc()))))
        raise
