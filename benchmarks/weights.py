"""Time to move a weights version from trainer to engines, compared with memcpy and torchstore.

python -m benchmarks.weights --json out.json

Moves 1 GiB of bfloat16 in Qwen3-0.6B's shapes from one writer process to 1, 2 and 4 readers, each with its own
parameters, through the store as in a run; then to a reader on another host (a separate Monarch host on this machine).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import (
    LEAST_REPEATS,
    BenchmarkConfig,
    BenchmarkError,
    Report,
    check_repeats,
    median,
    run_benchmark,
)
from benchmarks.weight_actors import ReaderActor, Shapes, WriterActor
from forge_rl.jobs.process import local_hosts
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Replica, Service
from forge_rl.services.weight_store import WeightStore
from forge_rl.weights.manifest import BUCKET_BYTES, TensorSpec

READERS = (1, 2, 4)
_DEADLINE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure moving weights from trainer to engines."""

    gib: float = 1.0
    """Size of a version in GiB; the shapes are Qwen3-0.6B's, with as many layers as fit."""
    repeats: int = 7
    """Repeats of each measurement."""
    warm_up: int = 3
    """Warm-up versions, not counted: fresh shared memory is slow to touch."""
    smoke: bool = False
    """A few MiB, one repeat: checks that everything runs; measures nothing."""

    def __post_init__(self) -> None:
        if not self.smoke:
            check_repeats(self.repeats)
        if self.warm_up < 1:
            raise BenchmarkError(f"--warm-up is {self.warm_up}", hint="set --warm-up to 1 or more")
        if self.gib <= 0:
            raise BenchmarkError(f"--gib is {self.gib}", hint="set --gib above 0")


def measure(config: Config, report: Report) -> None:
    """Run the selected measurement."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    asyncio.run(_measure_store(config, report))


def qwen3_shapes(gib: float) -> Shapes:
    """Return names and shapes of Qwen3-0.6B's first layers, about `gib` GiB in bfloat16."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    room = int(gib * 2**29)

    def add(name: str, *shape: int) -> None:
        nonlocal room
        shapes.append((name, shape))
        room -= shape[0] * (shape[1] if len(shape) > 1 else 1)

    if room > 2 * 151936 * 1024:
        add("model.embed_tokens.weight", 151936, 1024)
    layer = 0
    # About the elements of one layer.
    while not layer or room > 15_700_000:
        prefix = f"model.layers.{layer}."
        for name, shape in (
            ("input_layernorm.weight", (1024,)),
            ("self_attn.q_proj.weight", (2048, 1024)),
            ("self_attn.k_proj.weight", (1024, 1024)),
            ("self_attn.v_proj.weight", (1024, 1024)),
            ("self_attn.o_proj.weight", (1024, 2048)),
            ("self_attn.q_norm.weight", (128,)),
            ("self_attn.k_norm.weight", (128,)),
            ("post_attention_layernorm.weight", (1024,)),
            ("mlp.gate_proj.weight", (3072, 1024)),
            ("mlp.up_proj.weight", (3072, 1024)),
            ("mlp.down_proj.weight", (1024, 3072)),
        ):
            add(prefix + name, *shape)
        layer += 1
    add("model.norm.weight", 1024)
    return tuple(shapes)


class _Bench:
    """Store with a writer and readers, and the measured rows."""

    def __init__(self, config: Config, report: Report, cluster: Cluster, faults: Faults) -> None:
        self.config = config
        self.report = report
        self.shapes = qwen3_shapes(0.03 if config.smoke else config.gib)
        self.specs = [TensorSpec(name=name, shape=shape) for name, shape in self.shapes]
        self.bytes = sum(2 * torch.Size(shape).numel() for _, shape in self.shapes)
        self.version = 0
        self.peak_extra = 0
        self._cluster = cluster
        self._faults = faults

    async def spawn(self, service: Service, actor: type, *, host: str = THIS_HOST) -> Replica:
        replica = service.spawn(actor, self.shapes, host=host)
        await service.watch(replica, deadline_s=_DEADLINE_S)
        return replica

    def service(self, name: str) -> Service:
        return Service(name, self._cluster, self._faults)

    async def store(self, **config: Any) -> WeightStore:
        hosts = config.pop("hosts", (THIS_HOST,))
        return await WeightStore.start(
            WeightStore.Config(**config),
            self._cluster,
            self._faults,
            deadline_s=_DEADLINE_S,
            hosts=hosts,
            expected_bytes=self.bytes,
        )

    def repeats(self) -> list[bool]:
        """Return, per repeat, whether it counts."""
        if self.config.smoke:
            return [False, True]
        return [False] * self.config.warm_up + [True] * self.config.repeats

    async def sync(self, store: WeightStore, writer: Replica, readers: Sequence[Replica]) -> dict[str, float]:
        """Return the seconds of one version from the end of an optimizer step to all readers ready and attested."""
        home, host = store.transport(writer.host), store.transport(readers[0].host)
        await writer.call("step", deadline_s=_DEADLINE_S)
        self.version += 1
        began = time.perf_counter()
        async with store.publishing(self.version, self.specs, torch.bfloat16, hosts=(writer.host,)) as publication:
            reports, extra = await writer.call("write", publication.draft, home, deadline_s=_DEADLINE_S)
            await publication.commit([reports])
        published = time.perf_counter()
        async with store.lease(self.version) as manifest:
            loads = [reader.call("load", manifest, host, deadline_s=_DEADLINE_S) for reader in readers]
            results = await asyncio.gather(*loads)
            for index, (fingerprints, _) in enumerate(results):
                # Part of the measured time, as a run attests every load.
                manifest.attest(fingerprints, f"reader {index}")
        ended = time.perf_counter()
        held_bytes = sum(path.stat().st_size for folder in store.folders for path in folder.iterdir())
        expected_bytes = 2 * manifest.bytes * len(store.folders)
        extras = [extra, *(extra_bytes for _, extra_bytes in results)]
        self.peak_extra = max(self.peak_extra, held_bytes - expected_bytes + max(extras))
        return {"publish": published - began, "load": ended - published, "end_to_end": ended - began}


async def _measure_store(config: Config, report: Report) -> None:
    async with _cluster() as (cluster, faults):
        bench = _Bench(config, report, cluster, faults)
        report.results["version_bytes"] = bench.bytes
        one_host = await _one_host(bench)
        torchstore = await _torchstore(bench)
    two_hosts = await _two_hosts(config, report)

    memcpy = report.measure("seconds_memcpy", one_host["memcpy"])
    parallel = report.measure("seconds_memcpy_parallel", one_host["memcpy_parallel"])
    publish = report.measure("seconds_publish", one_host["publish_1"])
    ends = {count: report.measure(f"seconds_end_to_end_{count}", one_host[f"end_to_end_{count}"]) for count in READERS}
    for count in READERS:
        report.measure(f"seconds_load_{count}", one_host[f"load_{count}"])
    attesting = report.measure("seconds_attestation", one_host["attestation"])
    torchstore_s = report.measure("seconds_end_to_end_torchstore", torchstore)
    rdma = report.measure("seconds_rdma", two_hosts["rdma"])
    remote = report.measure("seconds_load_other_host", two_hosts["load"])
    gb = bench.bytes / 1e9
    report.results |= {
        "gb_s_memcpy": gb / memcpy,
        "gb_s_memcpy_parallel": gb / parallel,
        "gb_s_publish": gb / publish,
        "gb_s_load": gb / report.results["seconds_load_1"],
        "gb_s_end_to_end": gb / ends[1],
        "publish_over_memcpy": memcpy / publish,
        "publish_over_parallel_memcpy": parallel / publish,
        "end_to_end_over_memcpy": memcpy / ends[1],
        "end_to_end_over_parallel_memcpy": parallel / ends[1],
        "end_to_end_over_torchstore": torchstore_s / ends[1],
        "gb_s_torchstore": gb / torchstore_s,
        "gb_s_rdma": gb / rdma,
        "gb_s_load_other_host": gb / remote,
        "four_readers_over_one": ends[4] / ends[1],
        "two_hosts_over_rdma": rdma / remote,
        "attestation_share": 2 * attesting / ends[1],
        "peak_extra_bytes": bench.peak_extra,
        "bucket_bytes": max(BUCKET_BYTES, *(2 * torch.Size(shape).numel() for _, shape in bench.shapes)),
    }


async def _one_host(bench: _Bench) -> dict[str, list[float]]:
    """Return the seconds of each repeat, by measurement."""
    store = await bench.store(transport="shared_memory")
    writing, reading = bench.service("writer"), bench.service("reader")
    writer = await bench.spawn(writing, WriterActor)
    readers = [await bench.spawn(reading, ReaderActor) for _ in range(max(READERS))]
    times: dict[str, list[float]] = {}
    cores = bench.report.machine["cores"]
    for counts in bench.repeats():
        row: dict[str, float] = {}
        for name, threads in (("memcpy", 1), ("memcpy_parallel", cores)):
            row[name] = await writer.call("memcpy", threads, deadline_s=_DEADLINE_S)
        row["attestation"] = median(await writer.call("attestation_s", 10, deadline_s=_DEADLINE_S))
        for count in READERS:
            seconds = await bench.sync(store, writer, readers[:count])
            row |= {f"{name}_{count}": value for name, value in seconds.items()}
        _keep(bench.report, "shared_memory", counts, row, times)
    for service in (writing, reading):
        await service.stop()
    await store.stop()
    return times


async def _torchstore(bench: _Bench) -> list[float]:
    """Return the seconds of each repeat of plain torchstore: one put and get per tensor, without versions."""
    store = await bench.store(transport="torchstore")
    writing, reading = bench.service("writer"), bench.service("reader")
    writer, reader = await bench.spawn(writing, WriterActor), await bench.spawn(reading, ReaderActor)
    times: dict[str, list[float]] = {}
    for number, counts in enumerate([False, *[True] * (1 if bench.config.smoke else LEAST_REPEATS)]):
        began = time.perf_counter()
        await writer.call("torchstore_put", store.transport(), f"{number}/", deadline_s=_DEADLINE_S)
        put = time.perf_counter()
        await reader.call("torchstore_get", store.transport(), f"{number}/", deadline_s=_DEADLINE_S)
        ended = time.perf_counter()
        row = {"publish": put - began, "load": ended - put, "end_to_end": ended - began}
        _keep(bench.report, "torchstore", counts, row, times)
        await writer.call("torchstore_delete", store.transport(), f"{number}/", deadline_s=_DEADLINE_S)
    for service in (writing, reading):
        await service.stop()
    await store.stop()
    return times["end_to_end"]


async def _two_hosts(config: Config, report: Report) -> dict[str, list[float]]:
    """Move a version from one host to a reader on another, and the same bytes with plain RDMABuffers."""
    times: dict[str, list[float]] = {}
    async with _cluster(hosts=("trainer", "generator")) as (cluster, faults):
        bench = _Bench(config, report, cluster, faults)
        store = await bench.store(transport="shared_memory", hosts=("trainer", "generator"))
        writing, reading = bench.service("writer"), bench.service("reader")
        writer = await bench.spawn(writing, WriterActor, host="trainer")
        reader = await bench.spawn(reading, ReaderActor, host="generator")
        buffers = await writer.call("rdma_buffers", BUCKET_BYTES, deadline_s=_DEADLINE_S)
        sizes = [min(BUCKET_BYTES, bench.bytes - offset) for offset in range(0, bench.bytes, BUCKET_BYTES)]
        for counts in [False, *[True] * (1 if config.smoke else LEAST_REPEATS)]:
            rdma = await reader.call("rdma_read", buffers, sizes, deadline_s=_DEADLINE_S)
            row = await bench.sync(store, writer, [reader])
            _keep(report, "two hosts", counts, {"rdma": rdma, **row}, times)
        for service in (writing, reading):
            await service.stop()
        await store.stop()
    return times


@asynccontextmanager
async def _cluster(hosts: Sequence[str] = ()) -> AsyncIterator[tuple[Cluster, Faults]]:
    """Yield a cluster of this host and of simulated hosts with these names, which are processes of this machine."""
    with tempfile.TemporaryDirectory(prefix="weights-") as scratch:
        faults = Faults()
        faults.install()
        async with local_hosts(hosts) as meshes:
            cluster = Cluster(Path(scratch), hosts=meshes)
            try:
                yield cluster, faults
            finally:
                faults.closing = True
                await cluster.close()


def _keep(report: Report, side: str, counts: bool, row: dict[str, float], times: dict[str, list[float]]) -> None:
    report.rows.append({"side": side, "warm_up": not counts, **row})
    if counts:
        for name, value in row.items():
            times.setdefault(name, []).append(value)
    print(f"{side}: " + "  ".join(f"{name} {value:.3f} s" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    run_benchmark("weights", Config, measure)
