"""Settings that follow the model's size and the machine where the user names none, and stay in resumed runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from forge_rl import RunConfig
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.memory import TrainMemory
from forge_rl.engines.optimizer import OptimizerConfig, moments_bytes
from forge_rl.engines.protocol import TrainSettings
from forge_rl.flags.command_line import parse
from forge_rl.run.plan.defaults import with_context, with_recomputation
from forge_rl.run.plan.scaled import CONTEXT, LR, NEW_TOKENS, chosen_values, open_flags, with_scaled
from forge_rl.services import generator_config, trainer_config
from forge_rl.services.trainer import Trainer
from recipes import code, dapo, distill, dpo, grpo, ppo, reward_model, sft

WEIGHTS = {"135M": 134_515_008, "1.7B": 1_720_574_976, "8B": 8_030_261_248}


def model(name: str, positions: int = 131_072) -> Any:
    return SimpleNamespace(weights=WEIGHTS[name], max_positions=positions, rope={"rope_type": "none"})


@pytest.mark.parametrize(
    ("recipe", "words", "size", "lr", "line"),
    [
        (grpo, (), "135M", 3e-5, "3e-05 for models up to SmolLM2-135M's size"),
        (grpo, (), "1.7B", 2.3e-6, "3e-05 for SmolLM2-135M, over 12.8 times the weights"),
        (grpo, (), "8B", 1e-6, "3e-05 for SmolLM2-135M, over 59.7 times the weights, but at least 1e-06"),
        (sft, (), "8B", 3.9e-6, "3e-05 for SmolLM2-135M, over the root of 59.7 times the weights"),
        (dpo, (), "8B", 1e-6, "over 59.7 times the weights"),
        (grpo, ("--trainer.optimizer.lr", "3e-5"), "8B", 3e-5, ""),
        (grpo, ("--lora.rank", "8", "--trainer.optimizer.lr", "3e-5"), "8B", 3e-5, "for adapters: as given; 10 times"),
        (sft, ("--lora.rank", "8"), "8B", 3.9e-5, "times 10 for adapters"),
        *((recipe, ("--lora.rank", "8"), "8B", 1e-5, "times 10 for adapters") for recipe in (dpo, distill)),
        (reward_model, (), "8B", 3.9e-6, "59.7 times"),
        (ppo, ("--lora.rank", "8"), "8B", 1e-5, "--critic.optimizer.lr 3.9e-06"),
    ],
)
def test_the_learning_rate_falls_with_the_models_size_unless_named(
    recipe: Any, words: Sequence[str], size: str, lr: float, line: str
) -> None:
    config = parse(recipe.Config, "recipe", ["--tasks", "rows.jsonl", *words])
    scaled, critic, lines = with_scaled(
        config, getattr(config, "critic", None), architecture=model(size), critics=model(size)
    )
    assert scaled.trainer.optimizer.lr == pytest.approx(lr)
    assert line in "".join(lines)
    if critic is not None:
        assert critic.optimizer.lr == pytest.approx(3.9e-6 if size == "8B" else 3e-5), "of full training"
    second_config, _, _ = with_scaled(replace(config, seed=3), None, architecture=model(size))
    assert second_config.trainer.optimizer.lr == pytest.approx(lr), "a changed copy knows what was named"


def test_a_resumed_run_keeps_what_it_began_with_on_any_machine() -> None:
    config = parse(grpo.Config, "grpo", [])
    begun, _, _ = with_scaled(config, None, architecture=model("8B"))
    choices = chosen_values(open_flags(config), begun, None) | {NEW_TOKENS: 512, "trainer.seq_len": 2048}
    resumed, _, lines = with_scaled(config, None, architecture=model("8B"), earlier=choices)
    assert (resumed.trainer.optimizer.lr, resumed.generator.max_tokens, resumed.trainer.seq_len) == (1e-6, 512, 2048)
    assert lines == ["--generator.max-tokens 512 --trainer.optimizer.lr 1e-06 --trainer.seq-len 2048: as the run began"]
    assert not open_flags(resumed) & choices.keys(), "nothing chooses them anew"
    named = parse(grpo.Config, "grpo", ["--trainer.optimizer.lr", "1e-5", "--generator.max-tokens", "16"])
    resumed, _, _ = with_scaled(named, None, architecture=model("8B"), earlier=choices)
    assert (resumed.trainer.optimizer.lr, resumed.generator.max_tokens) == (1e-5, 16), "named"
    for earlier in ({}, {LR: "1", CONTEXT: True, NEW_TOKENS: 3.5}):  # of an earlier version; damaged
        resumed, _, lines = with_scaled(config, None, architecture=model("8B"), earlier=earlier)
        assert (resumed.trainer.optimizer.lr, lines) == (3e-5, [])
        assert not {LR, CONTEXT, NEW_TOKENS} & open_flags(resumed)
    del choices[LR], choices[NEW_TOKENS]
    resumed, _, lines = with_scaled(config, None, architecture=model("8B"), earlier=choices)
    assert resumed.trainer.optimizer.lr == 1e-6, "named when the run began, and no longer: as in a new run"
    assert "at least 1e-06" in lines[-1]
    assert open_flags(resumed) == {NEW_TOKENS}, "a GPU's memory decides"
    by_code, _, _ = with_scaled(grpo.Config(), None, architecture=model("8B"), earlier=choices)
    assert not {CONTEXT, NEW_TOKENS} & open_flags(by_code)


def test_a_flag_that_is_turned_off_is_named() -> None:
    flags = open_flags(parse(grpo.Config, "grpo", ["--trainer.no-enable-cpu-offload"]))
    assert flags == open_flags(parse(grpo.Config, "grpo", [])) - {"trainer.enable_cpu_offload"}


def test_an_open_context_ends_at_the_models_positions() -> None:
    config = parse(grpo.Config, "grpo", [])
    scaled, _, lines = with_scaled(config, None, architecture=model("135M", positions=512))
    assert scaled.generator.max_model_len == 512
    assert "the model's positions" in lines[-1]
    named = parse(grpo.Config, "grpo", ["--generator.max-model-len", "1024"])
    scaled, _, _ = with_scaled(named, None, architecture=model("135M", positions=512))
    assert scaled.generator.max_model_len == 1024, "and is refused"


def memory_of(state: int, per_token: int) -> Any:
    """A plan of a trainer whose activations are an eighth with recomputation."""

    def memory(settings: TrainSettings) -> TrainMemory:
        parts = dict.fromkeys(TrainMemory.__dataclass_fields__, 0)
        bytes_per_token = per_token // (1 if settings.activation_checkpointing == "none" else 8)
        moments = round(state * moments_bytes(settings.optimizer_state) / 16)
        return TrainMemory(
            **parts | {"weights": state // 2, "optimizer": moments, "activations": bytes_per_token * settings.seq_len}
        )

    return memory


@pytest.mark.parametrize(
    ("gib", "recompute", "moments"), [(64, "none", "float32"), (44, "full", "float32"), (30, "full", "bfloat16")]
)
def test_a_trainer_that_does_not_fit_on_this_machine_recomputes(gib: int, recompute: str, moments: str) -> None:
    config = parse(grpo.Config, "grpo", [])
    memory = memory_of(24 << 30, 16 << 20)
    settings = {"architecture": SimpleNamespace(weights=1 << 30), "host": gib << 30, "memory": memory}
    scaled_config, lines = with_recomputation(config, open_flags(config), **settings)
    assert (scaled_config.trainer.activation_checkpointing, scaled_config.trainer.optimizer_state) == (
        recompute,
        moments,
    )
    assert bool(lines) == (recompute == "full")
    named = parse(grpo.Config, "grpo", ["--trainer.activation-checkpointing", "none"])
    scaled_config, lines = with_recomputation(named, open_flags(named), **settings)
    assert (scaled_config.trainer.activation_checkpointing, lines) == ("none", []), "named"


@pytest.mark.parametrize(
    ("words", "gib", "expected"),
    [  # context, new tokens
        ((), 80, (4096, 2048)),
        ((), 40, (2048, 1024)),
        ((), 30, (1024, 512)),
        (("--generator.max-tokens", "16"), 80, (4096, 16)),
        (("--generator.max-model-len", "1024"), 80, (1024, 512)),
        (("--trainer.seq-len", "2048"), 80, (2048, 1024)),
    ],
)
def test_on_a_gpu_the_context_is_a_row_that_fits_and_half_of_it_new(
    words: Sequence[str], gib: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (trainer_config, generator_config):
        monkeypatch.setattr(module, "device_type", lambda: "cuda")
    config: RunConfig = parse(grpo.Config, "grpo", [*words])
    scaled_config, lines = with_context(
        config, open_flags(config), 8192, gpu=gib << 30, memory=memory_of(16 << 30, 8 << 20)
    )
    assert (scaled_config.generator.max_model_len, scaled_config.generator.max_tokens) == expected
    assert len(lines) == sum(new != old for new, old in zip(expected, (1024, 16), strict=True))


@dataclass(frozen=True, kw_only=True)
class OwnRate(grpo.Config):
    trainer: Trainer.Config = field(default_factory=lambda: Trainer.Config(optimizer=OptimizerConfig(lr=2e-6)))


def test_a_recipes_own_learning_rate_and_tokens_stay() -> None:
    assert LR not in open_flags(parse(OwnRate, "recipe", []))
    scaled, _, _ = with_scaled(parse(OwnRate, "recipe", ["--lora.rank", "4"]), None, architecture=model("8B"))
    assert scaled.trainer.optimizer.lr == pytest.approx(2e-5), "times 10 for adapters"
    for recipe in (dapo, code):
        config = parse(recipe.Config, "recipe", [])
        assert NEW_TOKENS not in open_flags(config)
    by_code = open_flags(grpo.Config(lora=LoRAConfig(rank=4)))
    assert LR in by_code
    assert not {NEW_TOKENS, CONTEXT} & by_code, "code says how long"
