"""Engines of tiny models with adapters, and peft's adapters with the same values, for tests and a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch

from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.factor_pairs import factor_pairs
from forge_rl.engines.titan.shards import ADAPTERS
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.engines.titan.update import Update
from tests.fakes import make_model, packed, random_batch, train_batch
from tests.plain_trainer import PlainTrainer
from tests.test_titan_train import plain_steps

LOSS = ClippedSurrogate()
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen2": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "deepseek_v3": {},
}
SPARSE = "qwen3_moe", "gpt_oss", "deepseek_v3"
WHOLE = LoRAConfig(rank=6, alpha=5.0, targets=("all-linear", "experts", "lm_head"))
"""Adapters of linear layers, experts, at half or a third of their rank, and the head."""


def engine_of(
    folder: Path, lora: LoRAConfig, *, reference: bool = False, travels: bool = False, **settings: Any
) -> TitanEngine:
    """An engine that publishes merged weights, or adapters if these travel."""
    lora = replace(lora, publish="adapters" if travels else "merged")
    options = {"dtype": "float64", "seq_len": 64, "optimizer": OptimizerConfig(lr=1e-2, max_grad_norm=1e9), **settings}
    return TitanEngine(folder, TrainSettings(lora=lora, **options), reference=reference)


def named_factors(engine: TitanEngine) -> dict[str, torch.nn.Parameter]:
    """An engine's adapters by peft's names."""
    factors = {}
    for pair in factor_pairs(engine.model):
        stem = pair.name.removesuffix(".weight")
        if pair.prefix:
            stem = stem.rpartition(".")[0] + ("" if pair.prefix == "down_" else ".base_layer")
        for kind, parameter in zip(ADAPTERS, pair.parameters, strict=True):
            factors[f"base_model.model.{stem}.{kind}.default.weight"] = parameter
    return factors


def in_peft(name: str, values: torch.Tensor) -> torch.Tensor:
    """A factor, or its gradient, as peft has it: of stacked experts [experts * rank, inputs], [outputs, rank *
    experts]."""
    if values.ndim < 3:
        return values
    return values.flatten(0, 1) if "lora_A" in name else values.permute(1, 2, 0).flatten(1)


def with_peft(model: torch.nn.Module, engine: TitanEngine, lora: LoRAConfig) -> Any:
    """Give transformers' model peft's adapters on the modules that the engine has them on, with the engine's values."""
    factors = named_factors(engine)
    experts = {pair.name for pair in factor_pairs(engine.model) if pair.prefix}
    modules = {pair.name.removesuffix(".weight") for pair in factor_pairs(engine.model) if not pair.prefix}
    rank = {factor.shape[-2] for name, factor in factors.items() if factor.ndim == 3 and "lora_A" in name}
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        target_modules=sorted(modules),
        target_parameters=sorted(experts),
        rank_pattern={name: r for name in experts for r in rank},
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, config)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained.keys() == factors.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(in_peft(name, factors[name]))
    return adapted


def gradient_deviation(
    folder: Path, family: str, lora: LoRAConfig, change: Callable[[torch.nn.Module], None] = lambda _: None
) -> tuple[float, float]:
    """The largest difference of an adapter's gradient from peft's in float64, and peft's largest gradient.

    Args:
        change: changes the weights that peft's base has.
    """
    model = make_model(folder, family, **FAMILIES[family])
    change(model)
    engine = engine_of(folder, lora)
    with torch.no_grad():
        for parameter in named_factors(engine).values():
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    gradients: dict[str, torch.Tensor] = {}
    clip = engine._parallelism.clip

    def recorded(*arguments: Any) -> torch.Tensor:
        gradients.update({name: in_peft(name, p.grad).clone() for name, p in named_factors(engine).items()})
        assert [n for n, p in engine.model.named_parameters() if p.grad is not None and "lora_" not in n] == []
        return clip(*arguments)

    engine._parallelism.clip = recorded  # type: ignore[method-assign]
    batch = random_batch(0, vocab=43)
    plain = PlainTrainer(model, engine.model, OptimizerConfig(lr=1e-2))
    plain.model = with_peft(plain.model, engine, lora)
    plain._trained = [p for p in plain.model.parameters() if p.requires_grad]
    plain._optimizer = torch.optim.SGD(plain._trained, lr=0.0)
    plain._config = OptimizerConfig(lr=1e-2, max_grad_norm=1e9)
    train_batch(engine, packed(batch, seq_len=64), LOSS, total_updates=5)
    plain_steps(plain, batch)
    expected = {name: p.grad for name, p in plain.model.named_parameters() if p.requires_grad}
    assert gradients.keys() == expected.keys()
    deviation = max(float((gradients[name] - expected[name]).abs().max()) for name in expected)
    return deviation, max(float(values.abs().max()) for values in expected.values())


def trained_engine(folder: Path, lora: LoRAConfig, family: str = "llama", **settings: Any) -> TitanEngine:
    """An engine whose adapters have taken two updates."""
    make_model(folder, family, **FAMILIES[family])
    engine = engine_of(folder, lora, **settings)
    for seed in range(2):
        train_batch(engine, packed(random_batch(seed, vocab=43)), LOSS, total_updates=5)
    return engine


def saved(engine: TitanEngine, source: Path, folder: Path) -> Path:
    for part in ("training", "model"):
        (folder / part).mkdir(parents=True)
    engine.save(folder, source, version=2).result()
    return folder


def check_rounding(
    engine: TitanEngine, parameters: Collection[torch.nn.Parameter], lora: LoRAConfig, *, vocab: int
) -> None:
    """Check that a float32 engine computes the same, in both passes, once its adapters' factors are rounded."""
    laid = packed(random_batch(3, vocab=vocab))

    def passes() -> list[torch.Tensor]:
        engine.forward_backward(Update(minibatch=laid.minibatches[0], loss=LOSS))
        gradients = [parameter.grad.clone() for parameter in parameters]  # type: ignore[union-attr]
        engine.model.zero_grad()
        return [*engine.logprobs(laid.rows, temperature=1.0), *gradients]

    results = passes()
    assert not all(values.equal(values.bfloat16().float()) for values in results[len(laid.rows) :])
    for parameter in parameters:
        rounded = parameter.data.bfloat16().float()
        assert not rounded.equal(parameter.data)
        parameter.data = rounded
    is_same = [torch.equal(*pair) for pair in zip(results, passes(), strict=True)]
    assert is_same == [lora.dtype == "bfloat16"] * len(results)
