"""Logprob gap between engine and trainer on a mixture-of-experts model, with and without router replay in training.

python -m benchmarks.router_replay --json out.json

A real engine decodes completions of a small random Qwen3-MoE in bfloat16 and reports its expert choices. The trainer
scores the same tokens with the same weights, in bfloat16 and in float32. The two round differently, so close router
scores lead to different experts; with replay, only rounding remains. The gap of a token is |trainer logprob - engine
logprob|.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.real_engines import engines
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.engines.platform import init_distributed
from forge_rl.engines.protocol import Dtype, TrainSettings
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, Row
from forge_rl.services.generator import Generator
from forge_rl.types import Batch, Episode, Group, Sampling, Task, Turn

_TASK = Task(id="1", source="random", messages=({"role": "user", "content": "go"},))
_LARGE = 0.1
"""Minimum gap of a token that counts as far off."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare logprobs of engine and trainer with and without router replay."""

    completions: int = 32
    """Number of completions, two per prompt."""
    tokens: int = 64
    """Tokens per completion."""
    layers: int = 4
    experts: int = 16
    top_k: int = 4

    def __post_init__(self) -> None:
        if self.completions < 2 or self.completions % 2 or not 1 <= self.tokens <= 400 or self.layers < 1:
            raise BenchmarkError("there is nothing to compare", hint="raise --completions, --tokens or --layers")
        if not 0 < self.top_k < self.experts:
            raise BenchmarkError(
                f"--top-k is {self.top_k} of {self.experts} experts", hint="lower --top-k or raise --experts"
            )


def measure(config: Config, report: Report) -> None:
    """Decode, score in each mode, and print a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_model(folder, config)
        turns = asyncio.run(_decode(folder, config))
        batch = _batch(turns)
        advantages = torch.tensor([[-1.0, 1.0]] * len(batch.groups))
        rows = pack(batch, advantages, Layout(seq_len=1024)).rows
        init_distributed(0, 1, "127.0.0.1", 0)
        dtypes: tuple[Dtype, ...] = ("bfloat16", "float32")
        for dtype, replays in product(dtypes, (False, True)):
            report.rows.append({"trainer": dtype, "replay": replays, **_score(folder, rows, dtype, replays=replays)})
        torch.distributed.destroy_process_group()
    for row in report.rows:
        suffix = f"{row['trainer']}_{'replay' if row['replay'] else 'own'}"
        names = ("mean_gap", "max_gap", "large_gaps", *(("replay_differs",) if row["replay"] else ()))
        report.results |= {f"{name}_{suffix}": float(str(row[name])) for name in names}
    Console(highlight=False).print(_table(report))


def _make_model(folder: Path, config: Config) -> None:
    """Save a random model with the bundled tokenizer, with weights large enough to make logits differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "qwen3_moe",
            vocab_size=49152,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=96,
            num_hidden_layers=config.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=config.experts,
            num_experts_per_tok=config.top_k,
            norm_topk_prob=True,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        ),
        dtype=torch.float32,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    bundled = resolve_model("smollm2-135m", default_cache())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(bundled / name, folder / name)


async def _decode(folder: Path, config: Config) -> list[Turn]:
    """Decode completions, two consecutive ones per prompt."""
    settings = Generator.Config(
        dtype="bfloat16", max_model_len=512, max_tokens=config.tokens, kv_cache_gib=0.25, routed_experts=True
    )
    drawn = np.random.default_rng(0)
    prompts = [drawn.integers(3, 49152, 16, dtype=np.int32) for _ in range(config.completions // 2)]
    async with engines(settings, str(folder)) as running:
        return await asyncio.gather(
            *(
                running.generator.generate(prompt, Sampling(max_tokens=config.tokens, seed=2 * index + repeat))
                for index, prompt in enumerate(prompts)
                for repeat in range(2)
            )
        )


def _batch(turns: list[Turn]) -> Batch:
    episodes = [Episode(task=_TASK, turns=(turn,)) for turn in turns]
    pairs = zip(episodes[::2], episodes[1::2], strict=True)
    return Batch(groups=tuple(Group(task=_TASK, episodes=pair) for pair in pairs), version=0)


def _score(folder: Path, rows: tuple[Row, ...], dtype: Dtype, *, replays: bool) -> dict[str, float]:
    """Return the gaps of all completion tokens; with replay, also the number of expert choices that differ."""
    from forge_rl.engines.titan.routing import routing_counts
    from forge_rl.engines.titan.train import TitanEngine

    engine = TitanEngine(folder, TrainSettings(dtype=dtype, seq_len=1024, router_replay=replays))
    gaps, counts = [], []
    for row in rows:
        (logprobs,) = engine.logprobs([row], temperature=1.0)
        gaps.append((logprobs - row.behaviour)[row.mask].abs())
        row_counts = routing_counts(engine.model)
        assert row_counts is not None, "the model has experts"
        counts.append(row_counts)
    gap = torch.cat(gaps)
    _, num_known, num_different = torch.stack(counts).sum(dim=(0, 1))[-3:].tolist()
    figures = {
        "mean_gap": float(gap.mean()),
        "max_gap": float(gap.max()),
        "large_gaps": float((gap > _LARGE).float().mean()),
        "tokens": float(len(gap)),
    }
    return figures | ({"replay_differs": num_different / num_known} if replays else {})


def _table(report: Report) -> Table:
    table = Table(title="gap of a token between engine (bfloat16) and trainer", title_justify="left")
    for column in ("trainer", "replay", "mean", "max", f"tokens past {_LARGE}", "other choices"):
        table.add_column(column, justify="left" if column in ("trainer", "replay") else "right")
    for row in report.rows:
        mean, largest, share = (float(str(row[name])) for name in ("mean_gap", "max_gap", "large_gaps"))
        differs = f"{float(str(row['replay_differs'])):.2%}" if row["replay"] else ""
        replay = "yes" if row["replay"] else "no"
        table.add_row(str(row["trainer"]), replay, f"{mean:.4f}", f"{largest:.3f}", f"{share:.2%}", differs)
    return table


if __name__ == "__main__":
    run_benchmark("router_replay", Config, measure)
