"""Runs the trainer's forward pass on fake CUDA tensors, for all families and layouts, as one of many ranks.

python -m tools.check_cuda.forward

Fake tensors have shapes, dtypes and devices, but no values. A pass shows that every operation finds its tensors on the
GPU, with the right dtype and shape, through torchtitan's and FSDP's CUDA code, up to the logprobs. The process group
has no peers, tokens are spread evenly over the ranks that share experts, and FlexAttention is traced by Dynamo but not
compiled. The backward pass is left out, as torch needs the driver for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import layouts
from forge_rl.engines.families import FAMILIES
from forge_rl.engines.protocol import TrainSettings
from forge_rl.packing.rows import Row
from tools.check_cuda.report import report

SETTINGS: tuple[dict[str, Any], ...] = ({}, {"activation_checkpointing": "full"}, {"dtype": "float32"})
"""Single-rank settings that differ from the defaults on a GPU. float32 is only for dense families, as torch supports
grouped matmuls of fake tensors only in bfloat16."""


def main() -> int:
    """Run the forward pass of each case; print the passing cases, and count them by family."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    counts, failures = dict.fromkeys(FAMILIES, 0), []
    with tempfile.TemporaryDirectory() as folder:
        layouts.make_models(Path(folder), list(FAMILIES))
        for case, settings in cases():
            name = f"{case.family}, {case.name}"
            try:
                forward(Path(folder) / case.family, case, settings)
                print(name, flush=True)
                counts[case.family] += 1
            except Exception as error:  # from any part of the stack; the other cases are still worth checking
                traceback.print_exc()
                failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return report(counts, failures)


def cases() -> Iterator[tuple[layouts.Case, TrainSettings]]:
    """Yield every family in every layout that it supports, and on one rank with other settings."""
    for family in FAMILIES:
        layout_family = family if family in layouts.FAMILIES else "llama"
        for settings in SETTINGS:
            if "dtype" in settings and layouts.is_mixture(family):
                continue
            name = ", ".join(["one rank", *map(str, settings.values())])
            yield layouts.Case(family=family, name=name, ranks=1), TrainSettings(seq_len=1024, **settings)
        for case in layouts.cases([layout_family]):
            degrees: dict[str, Any] = dict(case.degrees)
            yield replace(case, family=family), TrainSettings(seq_len=1024, **degrees)


def forward(folder: Path, case: layouts.Case, settings: TrainSettings) -> None:
    """Score a row like the first rank with the head in training, with fake tensors, and check the results; in a
    pipeline, also pass it on like rank 0."""
    from forge_rl.packing.pack import pack
    from forge_rl.packing.rows import Layout

    batch = layouts.batches(1)[0]
    layout = Layout(seq_len=1024, pad_multiple=128, context_parallel_degree=settings.context_parallel_degree)
    row = pack(batch, torch.ones(batch.rewards.shape), layout).rows[0]
    head = settings.heads(case.ranks)[0]
    if head:
        with fake_engine(folder, settings, case.ranks) as score:
            assert not len(score(row)[0]), "this rank has no head"
    with fake_engine(folder, settings, case.ranks, rank=head) as score:
        scored = score(row)
    for values in scored:
        assert values.device.type == "cuda", values.device
        assert values.shape == (len(row),), values.shape
        assert values.dtype == torch.float32, values.dtype
    assert scored[0].requires_grad, "nothing would be trained"


@contextlib.contextmanager
def fake_engine(
    folder: Path, settings: TrainSettings, ranks: int = 1, backend: Any = "eager", rank: int = 0
) -> Iterator[Callable[[Row], tuple[torch.Tensor, torch.Tensor]]]:
    """Build a rank's train engine on a fake GPU, and yield a function that scores a row in host memory.

    Args:
        backend: torch.compile backend for the functions that torchtitan compiles.
    """
    from forge_rl.algorithms.logprobs import Scoring
    from forge_rl.engines.titan.rows import on_device
    from forge_rl.engines.titan.train import TitanEngine

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with fake_cuda(ranks, backend), FakeTensorMode() as mode:
            engine = TitanEngine(folder, settings)
            for name, tensor in (*engine.model.named_parameters(), *engine.model.named_buffers()):
                assert tensor.device.type == "cuda", f"{name} is on {tensor.device}"

            def score(row: Row) -> tuple[torch.Tensor, torch.Tensor]:
                with unset_fake_temporarily():
                    split, local_columns = engine._parallelism.split(row)
                    device_row = on_device(row, local_columns, torch.device("cpu"), split=split)
                    parts = {name: getattr(device_row, name) for name in ("local_indices", "scored_indices", "order")}
                    tensors = {
                        name: value.clone() for name, value in (parts | row.tensors()).items() if value is not None
                    }
                device_tensors: dict[str, Any] = {
                    name: mode.from_tensor(value).to("cuda") for name, value in tensors.items()
                }
                device_parts: dict[str, Any] = {name: device_tensors.pop(name, None) for name in parts}
                device_row = replace(device_row, row=replace(row, **device_tensors), **device_parts)
                scores = engine.scorer.score(engine.model, device_row, Scoring(temperature=0.7))
                return scores.logprobs, scores.entropy

            yield score
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # its meshes belong to that process group
        torch._dynamo.reset()


@contextlib.contextmanager
def fake_cuda(ranks: int, backend: Any) -> Iterator[None]:
    """Make the trainer, torchtitan and FSDP see a GPU per rank, with streams that do nothing."""
    import torchtitan.distributed.parallel_dims as parallel_dims
    import torchtitan.tools.utils
    from torch.distributed import device_mesh
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torchtitan.models.common import attention
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from forge_rl.engines import memory, platform
    from forge_rl.engines.titan import least_loaded, model, parallel, train

    handle = _Handle(ranks)
    real_handle = device_mesh._get_device_handle

    def handle_of(device_type: str = "cuda") -> Any:
        return handle if device_type == "cuda" else real_handle(device_type)

    with contextlib.ExitStack() as patches:

        def put(where: object, name: str, value: object) -> None:
            patches.enter_context(patch.object(where, name, value))

        for module in (device_mesh, _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
            put(module, "_get_device_handle", handle_of)
        put(parallel_dims.ParallelDims, "build_mesh", _on_real_tensors(parallel_dims.ParallelDims.build_mesh))
        mesh: Any = device_mesh.DeviceMesh
        put(mesh, "__init__", _on_real_tensors(mesh.__init__))
        put(mesh, "_concatenate", staticmethod(_on_real_tensors(mesh._concatenate)))
        put(mesh, "mesh", property(_on_real_tensors(mesh.mesh.fget)))
        for module in (torchtitan.tools.utils, parallel_dims):
            put(module, "device_type", "cuda")
        for module in (platform, model, parallel):
            put(module, "device_type", lambda: "cuda")
        for module in (platform, train, parallel):
            put(module, "own_device", lambda: torch.device("cuda", 0))
        put(AllToAllTokenDispatcher, "_sync_token_count_exchange", _unknown_splits)
        put(AllToAllTokenDispatcher, "_dispatch_token_exchange", _even_splits(AllToAllTokenDispatcher))
        put(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        put(memory, "gpu_bytes", lambda: 141 << 30)
        put(train, "load_weights", lambda *_, **__: None)  # there are no values
        put(train, "compile_attention", lambda: None)  # compiled below
        experts, sent_counts = least_loaded.LeastLoadedExperts, list[int]()
        put(experts, "forward", _noting_tokens(experts, sent_counts))
        put(least_loaded, "_gathered", lambda counts, group: _even_counts(len(counts), group.size(), sent_counts[-1]))
        put(FlexAttention, "_compiled_flex_attn", torch.compile(flex_attention, backend=backend))
        put(attention, "_compiled_create_block_mask", torch.compile(create_block_mask, backend=backend))
        flex = importlib.import_module("torch._higher_order_ops.flex_attention")
        put(flex, "create_fw_bw_graph", lambda graph, *_: (graph, None))  # torch needs the driver for a backward pass
        yield


class _Handle:
    """Stand-in for torch.cuda in FSDP: torch.cpu's streams and events, which do nothing, and a device per rank."""

    def __init__(self, devices: int) -> None:
        self.device_count = lambda: devices
        self.current_device = lambda: 0
        self.is_initialized = lambda: True
        self.set_device = lambda device: None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _unknown_splits(
    dispatcher: object, local_counts: torch.Tensor, counts: torch.Tensor, ranks: int
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Replace the wait for the experts' token counts, which fake tensors do not have."""
    return torch.ops._c10d_functional.wait_tensor(counts).reshape(-1), [0] * ranks, [0] * ranks


def _even_splits(dispatcher: Any) -> Callable[..., torch.Tensor]:
    exchange = dispatcher._dispatch_token_exchange

    def exchanged(self: Any, tokens: torch.Tensor, group: Any, theirs: list[int], ours: list[int]) -> torch.Tensor:
        """Exchange tokens evenly between ranks, and record that in the lists, which the way back uses."""
        for splits in (theirs, ours):
            splits[:] = [len(part) for part in tokens.tensor_split(len(splits))]
        received: torch.Tensor = exchange(self, tokens, group, theirs, ours)
        return received

    return exchanged


def _noting_tokens(experts: Any, sent_counts: list[int]) -> Callable[..., torch.Tensor]:
    forward = experts.forward

    @functools.wraps(forward)  # torchtitan looks at the arguments' names
    def noting(self: Any, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor) -> Any:
        sent_counts[:] = [ids.numel()]
        return forward(self, x, scores, ids, counts)

    return noting


def _even_counts(experts: int, ranks: int, num_sent: int) -> npt.NDArray[np.int64]:
    """Return counts as if every rank sent its tokens evenly to all experts, [ranks, experts]."""
    shares = [len(part) for part in np.array_split(np.arange(num_sent), experts)]
    return np.tile(np.array(shares, dtype=np.int64), (ranks, 1))


def _on_real_tensors(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return method(*args, **named)

    return called


if __name__ == "__main__":
    sys.exit(main())
