"""Counts, without a GPU, what an update costs the trainer on one: launches, bytes, FLOPs, and what the host waits for.

python -m benchmarks.update_cost --json out.json

The trainer's engine runs on meta tensors on CUDA's paths (`meta_engine.py`): rows of one-turn episodes, forward, loss,
metrics, backward, then the step. Every operation that is not a view is one launch that moves its inputs and outputs
once. Times are predicted from rates that were measured on an H100, kernels one after the other.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.counted_operations import FUSED_PRODUCTS, Cost, CountedOperations
from benchmarks.meta_engine import MetaEngine
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl import Batch, Episode, Group, Score, Task, Turn
from forge_rl.algorithms.logprobs import Scoring
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.platform import init_distributed
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.update import Update
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, Minibatch

BANDWIDTH = 3.0e12
"""Bytes/s of an H100's memory, measured (`benchmarks.gpu`)."""
PRODUCTS = 784e12
"""FLOP/s of its bfloat16 products, measured."""
ATTENTION = {"FlexAttention": 150e12, "FlashAttention": 235e12}
"""FLOP/s of attention in both passes. Flex: the time that 27 TFLOP took there, by the difference of measured updates.
Flash: not measured; an estimate, below what FlashAttention 2 is published to reach on an H100."""

FUSED = 600e12
"""FLOP/s of our products in Triton, which were not measured: an estimate, below what Triton's products are published to
reach on an H100. A trainer uses them only where it measures, at its start, that they are faster."""

_COMMON = {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936}
MODELS: dict[str, dict[str, Any]] = {
    name: _COMMON | json.loads(shape)
    for name, shape in (
        (
            "Qwen3-1.7B",
            """{"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": true}""",
        ),
        (
            "Qwen3-8B",
            """{"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": false}""",
        ),
        (
            "Qwen3-30B-A3B",
            """{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": false,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true}""",
        ),
        (
            "gpt-oss-20b",
            """{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": false,
            "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": true,
            "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000,
            "swiglu_limit": 7.0, "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096}}""",
        ),
    )
}
"""Published shapes, by name."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Count an update's launches, bytes, FLOPs and host waits on meta tensors."""

    models: tuple[str, ...] = tuple(MODELS)
    """Shapes to count; the first gives the results without a model's name."""
    tokens: int = 8192
    """Tokens of a row."""
    rows: int = 2
    """Rows of an update."""
    layers: int = 0
    """Layers to count; 0 means all."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.models if name not in MODELS] or not self.models:
            raise BenchmarkError(f"--models has {unknown}", hint=f"choose from {', '.join(MODELS)}")
        if self.tokens < 256 or self.tokens % 128 or self.rows < 1 or self.layers < 0:
            raise BenchmarkError(
                f"--tokens is {self.tokens}, --rows {self.rows}, --layers {self.layers}",
                hint="rows have a multiple of 128 tokens, at least 256, and an update has a row",
            )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of a model's update."""

    row: Cost
    """All rows."""
    head: Cost
    """Scores of a whole row and their gradient, part of the row."""
    step: Cost
    floor: float
    """Bytes that products and attention of a row cannot avoid."""
    useful: float
    """FLOPs of a row's products and attention, without what is computed again."""
    rows: int

    @property
    def seconds(self) -> float:
        """Predicted time of an update."""
        rates = ATTENTION | dict.fromkeys(FUSED_PRODUCTS, FUSED)
        return (self.row + self.step).seconds(rates, products=PRODUCTS, bandwidth=BANDWIDTH)


def measure(config: Config, report: Report) -> None:
    """Count each model."""
    init_distributed(0, 1, "127.0.0.1", 0)
    for index, name in enumerate(config.models):
        shape = MODELS[name] | ({"num_hidden_layers": config.layers} if config.layers else {})
        counts = count(shape, tokens=config.tokens, rows=config.rows)
        row, update = counts.row, counts.row + counts.step
        results = {
            "launches_a_row": sum(row.launches.values()) / counts.rows,
            "head_launches": float(sum(counts.head.launches.values())),
            "head_gigabytes": counts.head.other / 1e9,
            "launches_a_step": float(sum(counts.step.launches.values())),
            "gigabytes_a_row": sum(row.sizes.values()) / counts.rows / 1e9,
            "bytes_over_floor": sum(row.sizes.values()) / counts.rows / counts.floor,
            "tflop_a_row": sum(row.flops.values()) / counts.rows / 1e12,
            "host_waits": sum(row.waits.values()) / counts.rows,
            "waits_an_update": float(sum(update.waits.values())),
            "predicted_s": counts.seconds,
            "predicted_mfu": counts.rows * counts.useful / counts.seconds / PRODUCTS,
        }
        report.results |= {key if index == 0 else f"{key}_{name}": value for key, value in results.items()}
        if index == 0:
            plain = count(shape, tokens=config.tokens, rows=config.rows, fused=False)
            report.results |= {
                "launches_a_row_torch": sum(plain.row.launches.values()) / plain.rows,
                "bytes_over_floor_torch": sum(plain.row.sizes.values()) / plain.rows / plain.floor,
                "predicted_mfu_torch": plain.rows * plain.useful / plain.seconds / PRODUCTS,
            }
        for part, cost in (("rows", row), ("step", counts.step)):
            for operation, launches in cost.launches.most_common():
                size, flops = cost.sizes[operation], cost.flops[operation]
                report.rows.append(
                    {"model": name, "part": part, "operation": operation, "launches": launches}
                    | {"gigabytes": size / 1e9, "tflop": flops / 1e12}
                )
            report.rows += [{"model": name, "part": part, "wait": place, "times": n} for place, n in cost.waits.items()]


def count(shape: dict[str, Any], *, tokens: int, rows: int, fused: bool = True) -> Counts:
    """Count an update of a model with the given config.json; with `fused_products`, or torch's own in their place."""
    counter = CountedOperations()
    with tempfile.TemporaryDirectory(prefix="update-cost-") as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(shape))
        trainer = MetaEngine(folder, TrainSettings(dtype="bfloat16", seq_len=tokens), counter, fused=fused)
    update = Update(minibatch=_minibatch(tokens, rows), loss=ClippedSurrogate(), version=0)
    with trainer.on_device(), counter:
        results = trainer.rows(update)
        row, counter.cost = counter.cost, Cost()
        trainer.step(results)
        step, counter.cost = counter.cost, Cost()
        trainer.cast()
        counter.cost = Cost()
        _score(trainer.engine.model, tokens)
    floor, products = _floor(trainer.engine.model, shape, tokens)
    attention = sum(row.flops[kind] for kind in ATTENTION) / rows
    attended = sum(row.sizes[kind] for kind in ATTENTION) / rows
    return Counts(
        row=row,
        head=counter.cost,
        step=step,
        floor=floor + attended,
        # Both passes of attention count 3.5 times the forward pass, of which 0.5 is computed again.
        useful=products + attention * 3 / 3.5,
        rows=rows,
    )


def _score(model: Any, tokens: int) -> None:
    """Run the head alone on a row, forward and backward."""
    head = model.lm_head
    hidden = torch.empty(tokens, head.in_features, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    logprobs = head(hidden, targets, Scoring()).logprobs
    torch.autograd.backward(logprobs, torch.empty_like(logprobs))


def _minibatch(tokens: int, rows: int) -> Minibatch:
    """Make rows of one episode each, the most that attention can cost."""
    answer = tuple(index % 97 for index in range(tokens - 1))
    turn = Turn(prompt_ids=(1,), token_ids=answer, logprobs=(-1.0,) * len(answer), versions=(0,) * len(answer), text="")
    tasks = [Task(id=str(number), messages=(), source="count") for number in range(rows)]
    groups = [Group(task=task, episodes=(Episode(task=task, turns=(turn,), score=Score(total=1.0)),)) for task in tasks]
    layout = Layout(seq_len=tokens, pad_multiple=128, least_tokens=tokens)
    packed = pack(Batch(groups=tuple(groups), version=0), torch.ones(rows, 1), layout, drop_uniform=False)
    (minibatch,) = packed.minibatches
    return minibatch


def _floor(model: nn.Module, shape: dict[str, Any], tokens: int) -> tuple[float, float]:
    """Return the bytes that a row's products must move and their FLOPs: in both passes, each of the three products of a
    matrix reads two operands and writes a third in bfloat16, logits too. Experts share the tokens that chose them."""
    size = flops = 0.0
    experts_a_token = shape.get("num_experts_per_tok", 0)
    for name, weight in model.named_parameters():
        if "tok_embeddings" in name and not shape["tie_word_embeddings"]:
            continue
        if weight.ndim == 3:
            _, outputs, inputs = weight.shape
            product_tokens = tokens * experts_a_token
        elif weight.ndim == 2 and "bias" not in name:
            (outputs, inputs), product_tokens = weight.shape, tokens
        else:
            continue
        size += 3 * 2.0 * (product_tokens * (inputs + outputs) + weight.numel())
        flops += 3 * 2.0 * product_tokens * inputs * outputs
    return size, flops


if __name__ == "__main__":
    run_benchmark("update_cost", Config, measure)
