"""LoRA against peft: the same first values, gradients and merged weights; and what a run publishes, saves and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.lora import adapted_modules_of
from forge_rl.engines.titan.shards import ADAPTERS
from forge_rl.engines.titan.train import TitanEngine
from tests.fakes import make_model, packed, random_batch, train_batch
from tests.plain_trainer import InFloat64, PlainTrainer

pytestmark = pytest.mark.usefixtures("process_group")

LOSS = ClippedSurrogate()
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen2": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "deepseek_v3": {},
}


def engine_of(folder: Path, lora: LoRAConfig, *, reference: bool = False, **settings: Any) -> TitanEngine:
    options = {"dtype": "float64", "seq_len": 64, "optimizer": OptimizerConfig(lr=1e-2, max_grad_norm=1e9), **settings}
    return TitanEngine(folder, TrainSettings(lora=lora, **options), reference=reference)


def named_factors(engine: TitanEngine) -> dict[str, torch.nn.Parameter]:
    """An engine's adapters by peft's names."""
    return {
        f"base_model.model.{engine.model.names.to_hf(name).removesuffix('.weight')}.{kind}.default.weight": parameter
        for name, module in adapted_modules_of(engine.model)
        for kind in ADAPTERS
        for parameter in [getattr(module, kind)]
    }


def with_peft(model: torch.nn.Module, engine: TitanEngine, lora: LoRAConfig) -> Any:
    """Give transformers' model peft's adapters on the modules that the engine has them on, with the engine's values."""
    factors = named_factors(engine)
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in factors}
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.rslora, target_modules=sorted(modules), task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, config)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained.keys() == factors.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(factors[name])
    return adapted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rslora", [False, True])
def test_gradients_are_those_of_peft(family: str, rslora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if rslora and family != "qwen3":
        return
    lora = LoRAConfig(rank=3, alpha=5.0, rslora=rslora)
    model = make_model(tmp_path, family, **FAMILIES[family])
    engine = engine_of(tmp_path, lora)
    with torch.no_grad():
        for parameter in named_factors(engine).values():
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    gradients: dict[str, torch.Tensor] = {}
    clip = engine._parallelism.clip

    def recorded(*arguments: Any) -> torch.Tensor:
        gradients.update({name: p.grad.clone() for name, p in named_factors(engine).items()})
        assert [n for n, p in engine.model.named_parameters() if p.grad is not None and "lora_" not in n] == []
        return clip(*arguments)

    monkeypatch.setattr(engine._parallelism, "clip", recorded)
    batch = random_batch(0, vocab=43)
    plain = PlainTrainer(model, engine.model, OptimizerConfig(lr=1e-2))
    plain.model = with_peft(plain.model, engine, lora)
    plain._trained = [p for p in plain.model.parameters() if p.requires_grad]
    plain._optimizer = torch.optim.SGD(plain._trained, lr=0.0)
    plain._config = OptimizerConfig(lr=1e-2, max_grad_norm=1e9)
    train_batch(engine, packed(batch, seq_len=64), LOSS, total_updates=5)
    from tests.test_titan_train import plain_steps

    plain_steps(plain, batch)
    expected = {name: p.grad for name, p in plain.model.named_parameters() if p.requires_grad}
    assert gradients.keys() == expected.keys()
    assert max(float(expected[name].abs().max()) for name in expected) > 1e-3
    assert max(float((gradients[name] - expected[name]).abs().max()) for name in expected) < 1e-9
