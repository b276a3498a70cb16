"""A trainer of one GPU on the meta device: its engine's own code, on CUDA's paths, without memory or a GPU."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.counted_operations import CountedOperations
from forge_rl.engines import platform
from forge_rl.engines.devices import assumed_gpus
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan import building, cpu_feed_forward, head, parallel, plan, rows, scoring, train
from forge_rl.engines.titan.block_kernels import has_kernels
from forge_rl.engines.titan.row_attention import Sequences, sequences
from forge_rl.engines.titan.rows import DeviceRow
from forge_rl.engines.titan.update import RowResults, Update
from forge_rl.packing.rows import Row

_META = torch.device("meta")
_GPU_BYTES = 80 << 30


class MetaEngine:
    """Trains on the meta device while `counter` counts.

    What is no operation on meta tensors is counted by formula: attention is one kernel forward (FlashAttention two, as
    it fills a generator's state) and three backward.

    Args:
        fused: run as if a start had found `fused_products` faster than torch's.
    """

    def __init__(
        self, folder: Path, settings: TrainSettings, counter: CountedOperations, *, fused: bool = True
    ) -> None:
        self.counter, self._fused = counter, fused
        self.attention_flops = 0.0
        """Of both passes, without what is computed again."""
        with self.on_device():
            self.engine = train.TitanEngine(folder, settings)
        window_layers = self.engine.architecture.window_layers
        model: Any = self.engine.model
        for number, layer in model.layers.items():
            window = self.engine.architecture.window if int(number) in window_layers else None
            layer.attention.inner_attention = _CountedAttention(counter, window)
        self.engine.optimizer = _CountedAdamW(self.engine.model.parameters(), counter)

    def rows(self, update: Update) -> RowResults:
        """Run both passes of an update's rows."""
        return self.engine.forward_backward(update)

    def step(self, results: RowResults) -> None:
        """Run the optimizer's step, on gradients and weights in float32."""
        self.engine.optimizer_step(results, lr=1e-6)

    def cast(self) -> None:
        """Let the model have its weights in the dtype of the passes."""
        masters = self.engine.model.masters
        assert masters is not None, "one rank has them in two dtypes"
        masters.cast()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the engine's code run as on a GPU."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(assumed_gpus(1, _GPU_BYTES))
            for module in (train, parallel, platform):
                stack.enter_context(mock.patch.object(module, "own_device", return_value=_META))
            # torch's clipping takes all gradients at once on a GPU, and asks for its device's name.
            stack.enter_context(mock.patch.object(torch.nn.utils.clip_grad, "_has_foreach_support", return_value=True))
            if self._fused:
                for module in (head, cpu_feed_forward):
                    stack.enter_context(mock.patch.object(module, "has_fused_products", has_kernels))
            for name in ("compile_once", "compile_attention"):
                stack.enter_context(mock.patch.object(train, name))
            stack.enter_context(mock.patch.object(building, "load_weights"))
            stack.enter_context(mock.patch.object(scoring, "on_device", self._on_device))
            stack.enter_context(mock.patch.object(scoring, "attention_mask", return_value=None))
            stack.enter_context(plan._without_autocast())
            yield

    def _on_device(self, row: Row, local_indices: torch.Tensor, device: torch.device, **options: Any) -> DeviceRow:
        """Copy a row to the meta device, in one copy."""
        copy = rows.on_device(row, local_indices, torch.device("cpu"), **options)
        row_sequences = sequences(row)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
            tensors = {name: tensor.to(_META) for name, tensor in copy.row.tensors().items()}
            columns = {name: column.to(_META) for name, column in copy.row.columns.items()}
            local_indices, scored_indices = copy.local_indices.to(_META), copy.scored_indices.to(_META)
        self.counter.cost.copies += 1
        return replace(
            copy,
            row=replace(copy.row, **tensors, columns=columns),
            local_indices=local_indices,
            scored_indices=scored_indices,
            sequences=row_sequences,
        )


class _CountedAdamW(torch.optim.SGD):
    """torch's fused AdamW, which does not take meta tensors: reads weight, gradient and moments, writes all but one."""

    def __init__(self, weights: Iterable[torch.Tensor], counter: CountedOperations) -> None:
        super().__init__(weights)
        self._counter = counter

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Count an update of all weights."""
        elements = sum(weight.numel() for group in self.param_groups for weight in group["params"])
        # 28 bytes an element: weight, gradient and two moments are read, and all but the gradient written, in float32.
        self._counter.cost.add("AdamW", launches=-(-elements // (320 << 16)), size=28 * elements)


class _CountedAttention(torch.nn.Module):
    """Causal attention over a row as if it were one sequence."""

    def __init__(self, counter: CountedOperations, window: int | None) -> None:
        super().__init__()
        self._counter, self._window = counter, window

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """Take and return [1, L, heads, width]."""
        out: torch.Tensor = _Attention.apply(q, k, v, self._counter, self._window, _kind(options["attention_masks"]))
        if (transform := options.get("out_transform")) is not None:
            out = transform(out, out.new_empty(out.shape[:-1], dtype=torch.float32))
        return out


def _kind(masks: Any) -> str:
    return "FlashAttention" if isinstance(masks, Sequences) else "FlexAttention"


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        counter: CountedOperations,
        window: int | None,
        kind: str,
    ) -> torch.Tensor:
        tokens, out = q.shape[1], v.new_empty(*q.shape[:-1], v.shape[-1])
        keys = math.inf if window is None else window
        pairs = sum(min(keys, index + 1) for index in range(tokens)) if window else tokens * (tokens + 1) / 2
        # Two products for each causal pair and head: queries with keys, of q's width, and weights with values, of v's.
        ctx.flops = 2.0 * pairs * q.shape[2] * (q.shape[-1] + v.shape[-1])
        ctx.save_for_backward(q, k, v, out)
        ctx.counter, ctx.kind = counter, kind
        counter.cost.add(
            kind,
            launches=2 if kind == "FlashAttention" else 1,
            size=sum(x.nbytes for x in (q, k, v, out)),
            flops=ctx.flops,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        size = sum(x.nbytes for x in (q, k, v, out, grad, q, k, v))
        # Backward takes five products, one of which computes the weights again, against two forward.
        ctx.counter.cost.add(ctx.kind, launches=3, size=size, flops=2.5 * ctx.flops)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None, None
