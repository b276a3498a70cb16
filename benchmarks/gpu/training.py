"""Trainer benchmarks on one rank: seconds, tokens/s, MFU, peak memory, device handover, a checkpoint."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.device import products
from benchmarks.long_row import row_of
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.factory import make_train_engine, plan_training
from forge_rl.engines.platform import init_distributed
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.packing.rows import Minibatch

QWEN3_1_7B: dict[str, object] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
_REPEATS = 5


def random_model(folder: Path, shape: dict[str, object], kind: str = "qwen3") -> None:
    """Write a model with random bfloat16 weights to a folder; kind is a model_type of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def small() -> dict[str, float]:
    """Measure updates of a model with 4 layers, on rows of 1,024 tokens."""
    shape = QWEN3_1_7B | {"vocab_size": 32000, "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 3072}
    return _measure(shape, seq_len=1024)


def large() -> dict[str, float]:
    """Measure updates of a model with Qwen3-1.7B's shapes, on rows of 8,192 tokens."""
    return _measure(QWEN3_1_7B | {"vocab_size": 151936}, seq_len=8192)


def _measure(shape: dict[str, object], *, seq_len: int, rows: int = 2) -> dict[str, float]:
    speed = products()["bfloat16_tflop_s"] * 1e12
    folder = Path(tempfile.mkdtemp(prefix="forge_rl-model-"))
    try:
        random_model(folder / "model", shape)
        return _updates(folder, shape, speed, TrainSettings(dtype="bfloat16", seq_len=seq_len), rows)
    finally:
        shutil.rmtree(folder)


def _updates(
    folder: Path, shape: dict[str, object], speed: float, settings: TrainSettings, rows: int
) -> dict[str, float]:
    init_distributed(0, 1, "127.0.0.1", 0)
    planned = plan_training(folder / "model", settings, ranks=1, reference=False)
    engine = make_train_engine(folder / "model", settings)
    vocab = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    row = row_of(settings.seq_len, vocab)
    minibatch = Minibatch(rows=(row,) * rows, tokens=rows * len(row), sequences=rows)

    def update() -> float:
        began = time.perf_counter()
        (metrics,) = engine.train_batch([minibatch], StepRequest(loss=ClippedSurrogate(), total_updates=99)).metrics
        assert metrics is not None, "its gradient is not finite"
        torch.cuda.synchronize()
        return time.perf_counter() - began

    first_s = update()
    update()
    torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median([update() for _ in range(_REPEATS)])
    peak = torch.cuda.max_memory_allocated()
    tokens = rows * len(row)
    heads = int(str(shape["num_attention_heads"])) * int(str(shape["head_dim"]))
    # Both passes: 6 FLOP per weight and token, and 6 per causal token pair and hidden unit; none for padding.
    flop = 6 * engine.parameters * tokens + 6 * int(str(shape["num_hidden_layers"])) * heads * len(row) * tokens
    figures = {
        "first_update_s": first_s,
        "update_s": seconds,
        "tokens_per_s": tokens / seconds,
        "mfu_of_measured_products": flop / seconds / speed,
        "peak_gib": peak / 2**30,
        "planned_gib": planned.total / 2**30,
    }
    before = [parameter.detach().clone() for parameter in engine.model.parameters()]  # type: ignore[attr-defined]
    for name, move in (("offload", engine.offload), ("onload", engine.onload)) * 2:
        began = time.perf_counter()
        figures[f"{name}_gb_s"] = move() / 1e9 / (time.perf_counter() - began)  # second call, with pinned memory
    after = list(engine.model.parameters())  # type: ignore[attr-defined]
    figures["offload_bit_equal"] = float(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    for name in ("training", "model"):
        (folder / "saved" / name).mkdir(parents=True)
    began = time.perf_counter()
    saved = engine.save(folder / "saved", folder / "model", version=1)
    figures["save_held_up_s"] = time.perf_counter() - began
    saved.result()
    figures["saved_s"] = time.perf_counter() - began
    began = time.perf_counter()
    engine.load_training_state(folder / "saved" / "training")
    figures["read_back_s"] = time.perf_counter() - began
    return figures
