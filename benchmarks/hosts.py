"""Fan-out of a weights version to many hosts, and the size of what changes from one version to the next.

python -m benchmarks.hosts --json out.json

Moves a version from one Monarch host to 1, 2, 4 and 8 others, which are processes of this machine with segments of
their own, and counts the bytes that leave the first. Their measured speed gives the link of a simulation of many hosts
in virtual time, placed by the same code. The last part takes updates of a real trainer and writes each version as the
elements that changed.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.hosts_deltas import delta_bytes
from benchmarks.hosts_simulated import Link, simulate
from benchmarks.ranks import run_ranks
from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, Report, check_repeats, median, run_benchmark
from benchmarks.weight_actors import Shapes, WriterActor
from benchmarks.weights import qwen3_shapes
from forge_rl.errors import check_flags
from forge_rl.jobs.process import local_hosts
from forge_rl.models.bundled import bundled_model, default_cache
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Replica, Service
from forge_rl.services.weight_store import WeightStore
from forge_rl.weights.manifest import Manifest, TensorSpec

HOSTS = (1, 2, 4, 8)
_DEADLINE_S = 600.0
_WRITER = "writer"


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure the fan-out of weights to hosts, and what changes between versions."""

    mib: int = 256
    """Size of a version in MiB; the shapes are Qwen3-0.6B's, with as many layers as fit."""
    bucket_mib: int = 16
    """Size of a bucket."""
    repeats: int = LEAST_REPEATS
    """Repeats of each measurement, after one that does not count."""
    simulated_hosts: int = 256
    """Number of hosts in the simulation."""
    simulated_gib: float = 16.0
    """Size of the larger of two simulated versions; the other is the measured one."""
    updates: int = 4
    """Number of the trainer's updates, each of which is a version."""
    lr: float = 1e-6
    """Learning rate of the updates."""
    smoke: bool = False
    """A few MiB to 1 and 2 hosts, also simulated, one repeat, no trainer: checks that everything runs; measures
    nothing."""

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        check_flags(self, "--", minimum=dict.fromkeys(("mib", "bucket_mib", "simulated_hosts", "updates"), 1))


def measure(config: Config, report: Report) -> None:
    """Run all three parts."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    link, version = asyncio.run(_measure_hosts(config, report))
    for name, size in (("", version), ("_large", int(config.simulated_gib * 2**30))):
        _simulate(config, report, link, name, size)
    if not config.smoke:
        _measure_deltas(config, report)


async def _measure_hosts(config: Config, report: Report) -> tuple[Link, int]:
    """Move versions to hosts; returns the link to one of them, and a version's size."""
    counts = HOSTS[:2] if config.smoke else HOSTS
    readers = [f"reader{number}" for number in range(counts[-1])]
    shapes = qwen3_shapes(0.03 if config.smoke else config.mib / 1024)
    size = sum(2 * torch.Size(shape).numel() for _, shape in shapes)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    copies: dict[int, list[float]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory(prefix="hosts-") as scratch:
        faults = Faults()
        faults.install()
        async with local_hosts([_WRITER, *readers]) as meshes:
            cluster = Cluster(Path(scratch), hosts=meshes)
            try:
                store = await WeightStore.start(
                    WeightStore.Config(transport="shared_memory", bucket_mib=config.bucket_mib),
                    cluster,
                    faults,
                    deadline_s=_DEADLINE_S,
                    hosts=(_WRITER, *readers),
                    expected_bytes=size * (2 + len(readers)),
                )
                service = Service("writing", cluster, faults)
                writer = service.spawn(WriterActor, shapes, host=_WRITER)
                await service.watch(writer, deadline_s=_DEADLINE_S)
                for repeat in range(2 if config.smoke else 1 + config.repeats):
                    for number, count in enumerate(counts):
                        # Versions are immutable, so each measurement publishes a new one.
                        version = 1 + repeat * len(counts) + number
                        took, left = await _fan_out(store, writer, shapes, version, readers[:count])
                        row: dict[str, object] = {
                            "hosts": count,
                            "warm_up": not repeat,
                            "seconds": took,
                            "origin_copies": left,
                        }
                        report.rows.append(row)
                        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
                        if repeat:
                            seconds[count].append(took)
                            copies[count].append(left)
                await service.stop()
                await store.stop()
            finally:
                faults.closing = True
                await cluster.close()
    report.results["version_bytes"] = size
    for count in counts:
        report.measure(f"seconds_{count}", seconds[count])
        report.measure(f"origin_copies_{count}", copies[count])
        report.results[f"time_{count}_over_1"] = median(seconds[count]) / median(seconds[1])
    return Link(bytes_per_s=size / median(seconds[1]), bucket_bytes=config.bucket_mib << 20), size


async def _fan_out(
    store: WeightStore,
    writer: Replica,
    shapes: Shapes,
    version: int,
    readers: list[str],
) -> tuple[float, float]:
    """Publish a version and bring it to hosts; returns the seconds, and how many copies left the writer's host."""
    await writer.call("step", deadline_s=_DEADLINE_S)
    specs = [TensorSpec(name=name, shape=shape) for name, shape in shapes]
    async with store.publishing(version, specs, torch.bfloat16, hosts=(_WRITER,)) as publication:
        reports, _ = await writer.call("write", publication.draft, store.transport(_WRITER), deadline_s=_DEADLINE_S)
        await publication.commit([reports])
    async with store.lease(version) as manifest:
        before = await _left(store)
        began = time.perf_counter()
        # All hosts ask at once, as after a publish.
        await asyncio.gather(*(store.transport(host).prefetch(manifest) for host in readers))
        took = time.perf_counter() - began
        return took, (await _left(store) - before) / _sent(manifest)


async def _left(store: WeightStore) -> int:
    """Bytes that have left the writer's host."""
    return sum(received.get(_WRITER, 0) for received in (await store.received()).values())


def _sent(manifest: Manifest) -> int:
    return sum(bucket.bytes for bucket in manifest.buckets)


def _simulate(config: Config, report: Report, link: Link, name: str, size: int) -> None:
    hosts = HOSTS[1] if config.smoke else config.simulated_hosts
    single, many = simulate(link, size, 1), simulate(link, size, hosts)
    star = simulate(link, size, hosts, from_writer=True)
    death = simulate(link, size, hosts, death=True)
    report.results |= {
        f"simulated{name}_bytes": size,
        f"simulated{name}_seconds_1": single.seconds,
        f"simulated{name}_seconds_{hosts}": many.seconds,
        f"simulated{name}_seconds_{hosts}_from_writer": star.seconds,
        f"simulated{name}_seconds_{hosts}_with_a_death": death.seconds,
        f"simulated{name}_origin_copies_{hosts}": many.origin_copies,
        f"simulated{name}_origin_copies_{hosts}_with_a_death": death.origin_copies,
    }


def _measure_deltas(config: Config, report: Report) -> None:
    model = bundled_model(default_cache())
    with tempfile.TemporaryDirectory(prefix="deltas-") as scratch:
        ((version, full, deltas),) = run_ranks(delta_bytes, 1, model, scratch, config.lr, config.updates)
    report.rows += [{"update": number, "delta_bytes": size} for number, size in enumerate(deltas, 1)]
    shares = [size / version for size in deltas]
    report.results |= {"delta_version_bytes": version, "delta_full_bytes_share": full / version}
    report.measure("delta_bytes_share", shares)


if __name__ == "__main__":
    run_benchmark("hosts", Config, measure)
