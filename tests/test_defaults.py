"""Settings that are chosen by a GPU's memory and the model, on tables of GPUs and models; a CPU's stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_rl import RunConfig
from forge_rl.engines import devices
from forge_rl.engines.context import _cache_bytes
from forge_rl.engines.memory import TrainMemory
from forge_rl.engines.optimizer import moments_bytes
from forge_rl.engines.protocol import DecodeSettings, TrainSettings
from forge_rl.errors import ConfigError
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.example_config import ExampleConfig
from forge_rl.run.plan.defaults import choose, colocated, with_defaults
from forge_rl.services import generator_config, trainer_config
from forge_rl.services.generator import Generator
from forge_rl.services.trainer import Trainer

GB, GIB = 10**9, 2**30
GPUS = {"24 GB": 24 * GB, "80 GB": 80 * GB, "141 GB": 141 * GB}
WEIGHTS = {"135M": 134_479_872, "8B": 8_190_427_136, "30B-A3B": 30_531_911_680}
SMOLLM2 = """{"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
    "max_position_embeddings": 8192, "tie_word_embeddings": true}"""
ACTIVATIONS = {"135M": 0.99, "8B": 12.99, "30B-A3B": 12.30}
"""GiB of a row of 1,024 tokens in bfloat16, as a CPU saves them; a GPU saves less."""


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings have the defaults that they have on CUDA."""
    for module in (trainer_config, generator_config):
        monkeypatch.setattr(module, "device_type", lambda: "cuda")


def plan_of(model: str, ranks: int, reference: int = 0) -> Callable[[TrainSettings], TrainMemory]:
    """A plan in which bytes are those of the model's weights, and of a row by its tokens."""

    def plan(settings: TrainSettings) -> TrainMemory:
        weights = WEIGHTS[model] // ranks
        bytes_per_token = ACTIVATIONS[model] / (1 if settings.activation_checkpointing == "none" else 8)
        return TrainMemory(
            weights=4 * weights,
            gradients=4 * weights,
            optimizer=round(moments_bytes(settings.optimizer_state) * weights),
            moments=8 * weights,
            reference=reference * weights,
            gathered=2 * weights if ranks == 1 else 2 * WEIGHTS[model] // 24,
            activations=round(bytes_per_token * GIB * settings.seq_len / 1024),
            head=GIB // 2,
            masks=0,
            heap=0,
            offloaded=0,
            largest=0,
        )

    return plan


def chosen(model: str, gpu: str, *, there: int = 1, reference: int = 0, **settings: Any) -> tuple[RunConfig, list[str]]:
    ranks = settings.pop("ranks", 1)
    replicas, guests = settings.pop("replicas", 1), settings.pop("guests", 0)
    named_flags = {flag: settings.pop(flag) for flag in ("seq_len", "enable_cpu_offload") if flag in settings}
    share = (
        {"gpu_memory_utilization": settings.pop("gpu_memory_utilization")}
        if "gpu_memory_utilization" in settings
        else {}
    )
    config = RunConfig(
        trainer=Trainer.Config(ranks=ranks, **named_flags),
        generator=Generator.Config(replicas=replicas, guests=guests, **share),
        **settings,
    )
    architecture: Any = SimpleNamespace(weights=WEIGHTS[model])
    memory = plan_of(model, ranks, reference)
    return choose(config, architecture, gpu=GPUS[gpu], num_gpus=there, memory=memory)


def told(config: RunConfig) -> tuple[int, bool, bool, float, str]:
    trainer = config.trainer
    share = config.generator.gpu_memory_utilization
    return trainer.seq_len, trainer.stays_on_device, trainer.enable_cpu_offload, share, config.placement


@pytest.mark.parametrize(
    ("model", "gpu", "ranks", "expected"),
    [  # tokens of a row, state stays, CPU offload, share of the engines, placement
        ("135M", "24 GB", 1, (8192, True, False, 0.83, "colocated")),
        ("135M", "80 GB", 1, (8192, True, False, 0.9, "colocated")),
        ("135M", "141 GB", 1, (8192, True, False, 0.9, "colocated")),
        ("8B", "24 GB", 1, (1024, False, False, 0.9, "colocated")),  # refused by the plan: no mode fits
        ("8B", "80 GB", 1, (8192, False, True, 0.9, "colocated")),
        ("8B", "141 GB", 1, (4096, False, False, 0.9, "colocated")),  # with moments in bfloat16
        ("8B", "80 GB", 8, (2048, True, False, 0.81, "colocated")),
        ("8B", "141 GB", 8, (4096, True, False, 0.89, "colocated")),
        ("30B-A3B", "141 GB", 8, (4096, False, False, 0.9, "colocated")),
        ("30B-A3B", "80 GB", 8, (4096, False, False, 0.9, "colocated")),
    ],
)
def test_on_gpus_that_both_share_rows_state_and_engines_get_what_there_is(
    model: str, gpu: str, ranks: int, expected: tuple[object, ...]
):
    config, lines = chosen(model, gpu, ranks=ranks, replicas=ranks, there=ranks)
    assert told(config) == expected
    recomputes = config.trainer.activation_checkpointing == "full"
    small = config.trainer.optimizer_state != "float32"
    assert recomputes == (config.trainer.enable_cpu_offload or small or (model, gpu) == ("30B-A3B", "80 GB")), (
        "before small moments and CPU offload"
    )
    assert small == ((model, gpu, ranks) == ("8B", "141 GB", 1)), "before CPU offload, and only where they suffice"
    assert len(lines) == 2 + config.trainer.stays_on_device + recomputes
    second_choice, nothing = choose(
        config, SimpleNamespace(weights=WEIGHTS[model]), gpu=GPUS[gpu], num_gpus=ranks, memory=plan_of(model, ranks)
    )  # type: ignore[arg-type]
    assert told(second_choice) == expected
    assert [line for line in nothing if "stays" not in line] == []


def test_what_the_user_gave_stays():
    config, lines = chosen("135M", "80 GB", seq_len=1024, gpu_memory_utilization=0.5, placement="colocated")
    assert told(config) == (1024, True, False, 0.5, "colocated")
    assert len(lines) == 1
    config, _ = chosen("135M", "24 GB", gpu_memory_utilization=0.89, placement="colocated")
    assert not config.trainer.stays_on_device, "the engines' share leaves it no room"


def test_turns_are_taken_on_shared_gpus_where_that_costs_nothing():
    config, lines = chosen("135M", "80 GB", there=2)
    assert told(config) == (8192, True, False, 0.9, "colocated")
    assert "on 1 of 2 GPUs" in lines[0]
    apart, lines = chosen("8B", "141 GB", there=2)
    assert (apart.placement, apart.generator.gpu_memory_utilization) == ("auto", 0.9)
    assert not any("placement" in line for line in lines), "its state would move each time"
    for settings in ({"ranks": 2}, {"placement": "separate"}, {"schedule": ScheduleConfig(kind="one_step")}):
        chosen_config, _ = chosen("135M", "80 GB", there=4, **settings)  # type: ignore[arg-type]
        assert not chosen_config.trainer.stays_on_device
        assert chosen_config.placement == settings.get("placement", "auto")


@pytest.mark.parametrize(
    ("general", "hot", "balance"), [(False, 40, "least_loaded"), (True, 40, "plain"), (False, 1, "plain")]
)
def test_ranks_lend_hot_experts_that_do_not_fit_before_moments_are_rounded(general: bool, hot: int, balance: str):
    def memory(settings: TrainSettings) -> TrainMemory:
        plan = plan_of("30B-A3B", 8)(settings)
        return replace(plan, hot_experts=0 if settings.expert_balance == "least_loaded" else hot * GIB)

    config = RunConfig(
        trainer=Trainer.Config(ranks=8, expert_parallel_degree=8), generator=Generator.Config(replicas=8)
    )
    architecture: Any = SimpleNamespace(weights=WEIGHTS["30B-A3B"], family=SimpleNamespace(general=general))
    config, lines = choose(config, architecture, gpu=GPUS["80 GB"], num_gpus=8, memory=memory)
    assert config.trainer.expert_balance == balance
    assert any("--trainer.expert-balance least_loaded" in line for line in lines) == (balance == "least_loaded")
    if balance == "least_loaded":
        assert (config.trainer.optimizer_state, config.trainer.enable_cpu_offload) == ("float32", False)


def test_guests_get_the_trainers_gpu_memory_while_it_is_offloaded():
    asynchronous = ScheduleConfig(kind="asynchronous")
    config, _ = chosen("8B", "80 GB", ranks=8, there=16, guests=8, schedule=asynchronous)
    assert told(config) == (2048, False, False, 0.9, "auto")
    with pytest.raises(ConfigError, match="9 guests of 1 devices do not fit on the trainer's 8"):
        chosen("8B", "80 GB", ranks=8, there=17, guests=9, schedule=asynchronous)
    for schedule in ("pipelined", "synchronous"):
        with pytest.raises(ConfigError, match=f"under the schedule {schedule} they take turns"):
            chosen("8B", "80 GB", guests=1, schedule=ScheduleConfig(kind=schedule))
    with pytest.raises(ConfigError, match="guests does not work with engines of 2 hosts"):
        Generator.Config(guests=1, hosts_per_replica=2, tensor_parallel_size=2)


def test_a_reference_leaves_engines_less():
    without, _ = chosen("8B", "80 GB", ranks=8, replicas=8, there=8)
    with_one, _ = chosen("8B", "80 GB", ranks=8, replicas=8, there=8, reference=2)
    assert with_one.generator.gpu_memory_utilization < without.generator.gpu_memory_utilization


def test_rows_hold_the_longest_episode():
    config = RunConfig(trainer=Trainer.Config(), generator=Generator.Config(max_model_len=10_000))
    architecture: Any = SimpleNamespace(weights=WEIGHTS["135M"])
    chosen_config, _ = choose(config, architecture, gpu=GPUS["24 GB"], num_gpus=1, memory=plan_of("135M", 1))
    assert chosen_config.trainer.seq_len == 10_112, "a multiple of 128, and longer than rows need be"


def test_without_a_run_an_engine_takes_most_of_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forge_rl.engines.context.device_type", lambda: "cuda")
    monkeypatch.setattr("forge_rl.engines.context.gpu_bytes", lambda: 1000)
    architecture: Any = SimpleNamespace(weights=100)
    alone = Generator.Config(dtype="bfloat16")
    assert (alone.gpu_memory_utilization, alone.gpu_share) == (0, 0.9)
    assert _cache_bytes(architecture, alone) == 700
    assert _cache_bytes(architecture, replace(alone, gpu_memory_utilization=0.5)) == 300
    assert DecodeSettings().gpu_share == 0.4


def test_on_a_cpu_nothing_is_chosen_for_a_model_that_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for module in (trainer_config, generator_config):
        monkeypatch.setattr(module, "device_type", devices.device_type)
    config = RunConfig()
    assert (config.trainer.seq_len, config.generator.gpu_memory_utilization) == (1024, 0.4)
    (tmp_path / "config.json").write_text(SMOLLM2)
    assert with_defaults(config, tmp_path, reference=True) == (config, None, [])


@pytest.mark.parametrize("tokens", [128, 1000])
def test_rows_that_flex_attention_cannot_take_are_refused(tokens: int):
    with pytest.raises(ConfigError, match="cannot be packed") as caught:
        Trainer.Config(seq_len=tokens).check_devices()
    assert "a multiple of 128, from 256" in caught.value.hint


def test_a_run_without_engines_leaves_the_gpu_to_the_trainer() -> None:
    config = ExampleConfig(trainer=Trainer.Config(ranks=1))
    architecture: Any = SimpleNamespace(weights=WEIGHTS["8B"])
    chosen_config, lines = choose(config, architecture, gpu=GPUS["141 GB"], num_gpus=1, memory=plan_of("8B", 1))
    assert told(chosen_config) == (8192, False, False, config.generator.gpu_memory_utilization, "auto"), lines
    assert chosen_config.trainer.optimizer_state == "bfloat16"
    small, lines = choose(config, architecture, gpu=GPUS["80 GB"], num_gpus=1, memory=plan_of("135M", 1))
    assert told(small) == (8192, False, False, config.generator.gpu_memory_utilization, "auto")
    assert len(lines) == 1
    with pytest.raises(ConfigError, match="2 trainer ranks need as many GPUs, but there are 1"):
        colocated(replace(config, trainer=Trainer.Config(ranks=2)), num_gpus=1)
