"""Loads versions into vLLM's models without their engines, and reports what each worker then holds.

python -m tests.stack_loads SCRATCH RANK RANKS: for each case in SCRATCH/cases.json, a folder with an engine's
settings, publishes the folder's weights in the trainer's order and loads them over others; then again with a mistake in
an expert.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.weights import segment
from forge_rl.weights.manifest import Manifest
from forge_rl.weights.segment import SegmentBucket
from tests.engine_conformance import publish

BUCKET_BYTES = 1 << 16
"""Less than a stack of experts, so that some lie in several buckets."""


class Published(torch.nn.Module):
    """Weights of a folder in the trainer's order: those of a layer's experts that are in one tensor, one by one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        beyond = f"model.layers.{read_architecture(folder).layers}."
        weights = load_file(folder / "model.safetensors")
        self._weights = {
            name: values for name, values in in_trainers_order(weights).items() if not name.startswith(beyond)
        }

    def named_parameters(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        return iter((name, torch.nn.Parameter(values)) for name, values in self._weights.items())


def in_trainers_order(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights in an order in which those of all experts of a layer follow one another."""

    def place(name: str) -> tuple[str, int]:
        match = re.fullmatch(r"(.+\.experts\.)(\d+)(\..+)", name)
        return (match[1] + match[3], int(match[2])) if match else (name, 0)

    return {name: weights[name] for name in sorted(weights, key=place)}


def load(engine: Any, manifest: Manifest) -> list[Any]:
    """Load a version, each of whose buckets is overwritten once the next is asked for; return the worker's shards."""
    from forge_rl.engines.vllm.transfer import BucketUpdateInfo

    engine.start_weight_update()
    for bucket in manifest.buckets:
        assert bucket.segment is not None
        ref, fd = segment.create_anonymous(bucket.bytes)
        memory = segment.writable(ref)
        memory.copy_(segment.readable(bucket.segment))
        copied_bucket = SegmentBucket(segment=ref, entries=manifest.entries[bucket.key])
        engine.receive_weights(BucketUpdateInfo(version=manifest.version, bucket=pickle.dumps(copied_bucket)))
        memory.fill_(0x7F)
        os.close(fd)
    engine.finish_weight_update()
    return list(engine.report().shards)


def spoil(manifest: Manifest, name: str) -> None:
    """Change an element of a published tensor after its fingerprint was taken."""
    (entry,) = (entry for entry in manifest.tensors if entry.name == name)
    (bucket,) = (bucket for bucket in manifest.buckets if bucket.key == entry.bucket)
    assert bucket.segment is not None
    entry.of(segment.writable(bucket.segment)).view(-1)[3] += 1.0


def check(folder: Path, scratch: Path, settings: DecodeSettings, rank: int, ranks: int) -> dict[str, Any]:
    """Load a folder's weights over others, and again with a mistake in the last expert of the last stack."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    from forge_rl.engines.vllm.arguments import engine_arguments
    from forge_rl.engines.vllm.transfer import BucketTransferEngine, NoInitInfo

    config = engine_arguments(folder, settings, seed=0).create_engine_config()
    config.additional_config = {}
    loader, calls = RoutedExperts.weight_loader, list[str]()

    @functools.wraps(loader)  # vLLM binds arguments by the loader's signature
    def counted(self: RoutedExperts, *arguments: Any, **options: Any) -> Any:
        calls.append("")
        return loader(self, *arguments, **options)

    RoutedExperts.weight_loader = counted  # type: ignore[method-assign]
    try:
        with set_current_vllm_config(config), torch.device("cpu"):
            if not torch.distributed.is_initialized():
                init_worker_distributed_environment(config, rank, f"file://{scratch}/meeting", rank, "gloo")
            model = get_model(vllm_config=config)
            start_calls = len(calls)
            engine = BucketTransferEngine(config.weight_transfer_config, config, torch.device("cpu"), model)  # type: ignore[arg-type]
            engine.init_transfer_engine(NoInitInfo())
            tensors = {name: values.clone() for name, values in model.state_dict().items()}
            for values in model.parameters():
                values.data.fill_(0.5)
            versions = Path(tempfile.mkdtemp(dir=scratch))
            dtype, weights = resolve_dtype(settings.dtype), Published(folder)
            manifest = publish(weights, versions, 1, bucket_bytes=BUCKET_BYTES, dtype=dtype)
            calls.clear()
            shards = load(engine, manifest)
            load_calls = len(calls)
            differing = [name for name, values in model.state_dict().items() if not torch.equal(values, tensors[name])]
            name = [entry.name for entry in manifest.tensors if ".experts." in entry.name][-1]
            spoiled = publish(weights, versions, 2, bucket_bytes=BUCKET_BYTES, dtype=dtype)
            spoil(spoiled, name)
            spoiled_shards = load(engine, spoiled)
    finally:
        RoutedExperts.weight_loader = loader  # type: ignore[method-assign]
    return {
        "manifest": replace(manifest, buckets=()),
        "shards": shards,
        "differing": differing,
        "start_calls": start_calls,
        "load_calls": load_calls,
        "spoiled": name,
        "spoiled_shards": spoiled_shards,
    }


def main(scratch: Path, rank: int, ranks: int) -> None:
    os.environ["VLLM_DIST_IDENT"] = scratch.name  # vLLM's name of the workers' shared memory, which their executor sets
    torch.accelerator.empty_cache = lambda: None  # as in vLLM's CPU worker
    cases = json.loads((scratch / "cases.json").read_text())
    results = [
        check(
            Path(case.pop("folder")), scratch, DecodeSettings(max_model_len=64, kv_cache_gib=0.1, **case), rank, ranks
        )
        for case in cases
    ]
    (scratch / f"{rank}.pickle").write_bytes(pickle.dumps(results))
    if ranks > 1:
        from forge_rl.engines.vllm import cpu

        cpu.unlink_shared_memory(os.getpid())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
