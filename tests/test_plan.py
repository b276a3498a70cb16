"""Plan of memory: its bytes are those that a real step allocates, and what cannot fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.training import QWEN3_1_7B
from benchmarks.long_row import row_of
from benchmarks.long_rows import write_config
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines import decode_layout, degrees, memory
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.context import sequence_bytes
from forge_rl.engines.devices import assumed_gpus
from forge_rl.engines.factory import plan_training
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.engines.titan import head as titan_head
from forge_rl.engines.titan import plan as titan_plan
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import ConfigError
from forge_rl.packing.rows import Minibatch, Row
from forge_rl.rollout import placement
from forge_rl.run.plan import defaults
from forge_rl.run.plan import memory as plan
from forge_rl.run.plan.memory import (
    PROCESS_BYTES,
    Need,
    check_state_fits,
    plan_run,
    refuse,
    show_plan,
    with_spares_that_fit,
)
from forge_rl.run.run_models import RunModels
from forge_rl.services import trainer_config
from forge_rl.services.generator import Generator
from forge_rl.services.trainer import Trainer
from recipes.grpo import Config
from tests.fakes import make_model
from tools.figures import FOLDER

pytestmark = pytest.mark.usefixtures("process_group")

SHAPE: dict[str, object] = {
    "vocab_size": 3000,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "max_position_embeddings": 4096,
}


def peak_of(engine: TitanEngine, *rows: Row) -> int:
    """Most bytes that an update has allocated at a time, by torch's profiler."""
    minibatch = Minibatch(rows=rows, tokens=sum(map(len, rows)), sequences=len(rows))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        engine.train_batch([minibatch], StepRequest(loss=ClippedSurrogate(), total_updates=9))
    assert prof.profiler is not None
    assert prof.profiler.kineto_results is not None
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    current_bytes = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current_bytes += event.nbytes()
        peak = max(peak, current_bytes)
    return peak


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_plan_is_what_an_update_allocates(
    family: str, checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(titan_head, "HEAD_CHUNK_BYTES", 1 << 20)
    make_model(tmp_path, family, **SHAPE)
    settings = TrainSettings(dtype="float32", seq_len=768, activation_checkpointing=checkpointing)  # type: ignore[arg-type]
    planned = plan_training(tmp_path, settings, ranks=1, reference=False)
    engine = TitanEngine(tmp_path, settings)
    few, many = row_of(16, 3000), row_of(768, 3000)
    peak_of(engine, few)  # makes what lasts
    measured_peak = peak_of(engine, few, many)  # the gradient of the first row is there when the second one begins
    expected = planned.gradients + planned.activations + planned.head
    assert expected == pytest.approx(measured_peak, rel=0.1)
    weight_bytes = sum(parameter.nbytes for parameter in engine.model.parameters())
    moments = sum(
        state_tensor.nbytes
        for state in engine.optimizer.state.values()
        for state_tensor in state.values()
        if state_tensor.dim()
    )
    assert (planned.weights, planned.gradients, planned.optimizer) == (weight_bytes, weight_bytes, moments)


def test_the_plan_of_a_gpu_is_what_one_took(tmp_path: Path):
    """The peak that `python -m benchmarks.gpu` measured on an H100, when each layer kept silu(a) for the product with
    b."""
    from transformers import AutoConfig

    AutoConfig.for_model("qwen3", **QWEN3_1_7B, vocab_size=151936, architectures=["Qwen3ForCausalLM"]).save_pretrained(
        tmp_path
    )
    (measured,) = (
        part["figures"]
        for part in json.loads((FOLDER / "gpu.json").read_text())["parts"]
        if part["part"] == "training_large"
    )
    settings = TrainSettings(dtype="bfloat16", seq_len=8192)
    with assumed_gpus(1, 80 << 30):
        planned = plan_training(tmp_path, settings, ranks=1, reference=False)
    silu_bytes = 2 * 8192 * QWEN3_1_7B["intermediate_size"] * QWEN3_1_7B["num_hidden_layers"]
    assert (planned.total + silu_bytes) / 2**30 == pytest.approx(measured["peak_gib"], rel=0.03)


def test_the_plan_of_a_cpu_is_what_rows_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The peaks that `python -m benchmarks.long_rows` measured."""
    monkeypatch.setattr(titan_plan, "device_type", lambda: "cpu")
    write_config(tmp_path, layers=30)
    rows = json.loads((FOLDER / "long_rows.json").read_text())["rows"]
    measured = {
        (row["how"], row["tokens"]): row["peak"] for row in rows if row["how"] == "full" and row["tokens"] <= 4096
    }
    assert measured.keys() == {("full", 1024), ("full", 4096)}
    for (checkpointing, tokens), peak in measured.items():
        settings = TrainSettings(dtype="float32", seq_len=tokens, activation_checkpointing=checkpointing)
        planned = plan_training(tmp_path, settings, ranks=1, reference=False)
        # Gaps in glibc's heap differ by 5% from run to run.
        assert PROCESS_BYTES + planned.total == pytest.approx(peak, rel=0.06)


def test_a_plan_splits_states_over_ranks_and_counts_frozen_parts(tmp_path: Path):
    make_model(tmp_path, **SHAPE)
    settings = TrainSettings(dtype="bfloat16", seq_len=128)
    planned = plan_training(tmp_path, settings, ranks=1, reference=True)
    two = plan_training(tmp_path, settings, ranks=2, reference=True)
    assert (two.weights, two.optimizer, two.reference) == (
        planned.weights // 2,
        planned.optimizer // 2,
        planned.weights // 4,
    )
    assert planned.reference == planned.weights // 2, "the reference is in bfloat16, as is what is computed with it"
    split = replace(settings, seq_len=64, context_parallel_degree=2)
    assert plan_training(tmp_path, split, ranks=2, reference=True).weights == two.weights
    assert two.activations == planned.activations
    assert planned.gathered == planned.weights // 2, "a single rank casts all to bfloat16, and keeps it"
    assert 0 < two.gathered < planned.gathered
    frozen = TrainSettings(dtype="bfloat16", seq_len=128, frozen=("model.embed_tokens.*", "lm_head.*"))
    less = plan_training(tmp_path, frozen, ranks=1, reference=False)
    assert less.weights == planned.weights
    assert planned.gradients - less.gradients == 2 * 4 * 3000 * 96
    assert less.optimizer == 2 * less.gradients


def test_a_plan_of_longer_rows_grows_by_what_is_kept(tmp_path: Path):
    make_model(tmp_path, **SHAPE)

    def bytes_per_token(checkpointing: str) -> float:
        totals = [
            plan_training(
                tmp_path,
                TrainSettings(dtype="float32", seq_len=tokens, activation_checkpointing=checkpointing),  # type: ignore[arg-type]
                ranks=1,
                reference=False,
            ).activations
            for tokens in (1024, 2048)
        ]
        return (totals[1] - totals[0]) / 1024

    none, selective, full = map(bytes_per_token, ("none", "selective", "full"))
    assert none > 1.5 * selective
    assert selective > 1.5 * full
    assert full > 4 * 96 * 4, "the input of each of four layers"


def test_what_cannot_fit_is_refused_with_the_flags_of_the_largest_part():
    needs = [
        Need(who="trainer rank", count=2, parts={"weights": 3, "activations": 4}, hint="lower this"),
        Need(who="engine", count=1, parts={"weights": 5}, hint="lower that"),
    ]
    refuse(needs, host=19, gpu=0)
    with pytest.raises(ConfigError, match=r"2 x .* for each trainer rank, but this machine has") as caught:
        refuse(needs, host=18, gpu=0)
    assert "lower this" in caught.value.hint
    assert "--plan" in caught.value.hint
    needs.append(Need(who="rank on a GPU", count=9, parts={"weights": 7}, hint="", of_gpu=True))
    refuse(needs, host=19, gpu=7)
    with pytest.raises(ConfigError, match="each rank on a GPU needs"):
        refuse(needs, host=19, gpu=6)


def test_a_run_is_planned_by_its_flags(tmp_path: Path):
    make_model(tmp_path, **SHAPE)
    config = Config(model=str(tmp_path))
    trainer, engine, store = plan_run(config, RunModels(policy=tmp_path))
    assert (trainer.count, engine.count, store.count) == (1, 1, 1)
    assert "frozen reference" not in trainer.parts
    copied = trainer.parts["copy of the state, while a checkpoint is written"]
    assert copied == 3 * trainer.parts["weights, float32"] + 4 * 3000 * 96, "and of the largest weight"
    assert engine.parts["keys and values"] == 2**30
    drafting = replace(config.generator, speculation=f"draft:{tmp_path},max_running=2")
    parts = plan_run(replace(config, generator=drafting), RunModels(policy=tmp_path))[1].parts
    assert parts["weights of the draft model"] == parts["weights, 4 bytes each"]
    assert parts["its keys and values"] == 2 * sequence_bytes(read_architecture(tmp_path), config.generator)
    for layout in ({"tensor_parallel_size": 2}, {"data_parallel_size": 2}):
        parallel = replace(config, generator=replace(config.generator, **layout))
        shards = plan_run(parallel, RunModels(policy=tmp_path))[1]
        copies = layout.get("data_parallel_size", 1)
        assert shards.parts["weights, 4 bytes each"] == copies * engine.parts["weights, 4 bytes each"], "of all shards"
    with_reference = plan_run(config, RunModels(policy=tmp_path, reference=True))[0]
    assert with_reference.total - trainer.total == trainer.parts["weights, float32"]
    assert (
        torch.finfo(torch.float32).bits
        // 8
        * sum(parameter.numel() for parameter in make_model(tmp_path, **SHAPE).parameters())
        == trainer.parts["weights, float32"]
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_counts_a_quantized_base_that_is_published_whole(ranks: int, tmp_path: Path):
    layers = 24
    config = write_config(tmp_path, layers)
    config.vocab_size = 1000  # with few tokens a row, so that a step needs little beside the layers
    config.save_pretrained(tmp_path)
    trainer = Trainer.Config(ranks=ranks, seq_len=32, dtype="float32")
    parts = {}
    for base_format in ("full", "nf4"):
        lora = LoRAConfig(rank=4, base_format=base_format)  # type: ignore[arg-type]
        run_config = Config(
            model=str(tmp_path), trainer=trainer, lora=lora, generator=Generator.Config(max_model_len=32)
        )
        parts[base_format] = plan_run(run_config, RunModels(policy=tmp_path))[0].parts
    name = "dequantised base, while a version is written whole, beyond what a step needs"
    assert name not in parts["full"]
    held_parts = {
        part for part in parts["nf4"] if part.startswith(("weights, float32", "optimizer", "process", "copy"))
    }
    step_bytes = sum(size for part, size in parts["nf4"].items() if part not in held_parts | {name})
    linear = layers * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert parts["nf4"][name] == 4 * linear // ranks - step_bytes > 0


def test_on_gpus_a_plan_counts_what_moves_to_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    make_model(tmp_path, **SHAPE)
    for module in (plan, placement, degrees, decode_layout, trainer_config):
        monkeypatch.setattr(module, "device_type", lambda: "cuda", raising=False)
        monkeypatch.setattr(module, "gpus", lambda: 1, raising=False)
    monkeypatch.setattr(plan, "gpu_bytes", lambda: 80 << 30)

    def host(config: Config, *, reference: bool = True) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for need in plan_run(config, RunModels(policy=tmp_path, reference=reference)):
            if not need.of_gpu:
                sizes |= {f"{need.who}: {part}": size for part, size in need.parts.items() if part != "process"}
        return sizes

    for module in (defaults, memory):
        monkeypatch.setattr(module, "gpu_bytes", lambda: 80 << 30)
    monkeypatch.setattr(defaults, "gpus", lambda: 1)
    monkeypatch.setattr(plan, "resolve_model", lambda *_: tmp_path)  # it has no tokenizer
    show_plan(Config(model=str(tmp_path)))
    output = capsys.readouterr().out
    assert "chosen: --trainer.seq-len 8192" in output
    assert "activations of 8192 tokens" in output
    assert "state that comes here" not in output, "it stays where both have room"
    given = Trainer.Config(seq_len=1024)
    config = Config(model=str(tmp_path), trainer=given, generator=Generator.Config(dtype="bfloat16"))
    rank = plan_training(tmp_path, config.trainer, ranks=1, reference=True)
    weights = 2 * read_architecture(tmp_path).weights
    trainer = "trainer rank, in host memory: "
    moving = {
        f"{trainer}copy of the state, while a checkpoint is written": rank.copy,
        f"{trainer}state that comes here while engines decode": rank.state,
        "worker of an engine, in host memory: weights, while it sleeps": weights,
        "store of weights: versions": 2 * weights,
    }
    assert host(config) == moving
    inside = replace(config, trainer=replace(config.trainer, enable_cpu_offload=True))
    del moving[f"{trainer}state that comes here while engines decode"]
    always = {"weights, float32": rank.weights, "gradients": rank.gradients, "optimizer state": rank.optimizer}
    always |= {"frozen reference": rank.reference}
    assert host(inside) == moving | {f"{trainer}{part}": size for part, size in always.items()}
    apart = replace(config, checkpoint_every=0, placement="separate")
    monkeypatch.setattr(placement, "gpus", lambda: 2)
    assert host(apart) == {"store of weights: versions": 2 * weights}
    one_version = replace(apart, weights=replace(apart.weights, keep_versions=1))
    assert host(one_version) == {"store of weights: versions": 2 * weights}, "one is held while the next is written"
    monkeypatch.setattr("forge_rl.services.weight_store_config.KEEP_BYTES", weights)
    assert host(replace(apart, weights=replace(apart.weights, keep_versions=9))) == host(apart)
    monkeypatch.setattr(plan, "host_bytes", lambda: rank.state)
    with pytest.raises(ConfigError, match=r"the run needs .* but this machine has"):
        check_state_fits(config, RunModels(policy=tmp_path, reference=True))


def test_spares_are_counted_and_left_out_if_memory_does_not_suffice(tmp_path: Path):
    make_model(tmp_path, **SHAPE)
    config = Config(model=str(tmp_path), generator=Generator.Config(dtype="bfloat16", spares=2))
    needs = {need.who: need for need in plan_run(config, RunModels(policy=tmp_path))}
    spare, engine = needs["spare engine"], needs["engine"]
    assert spare.count == 2
    assert engine.parts == spare.parts | {"keys and values": 1 << 30}
    total = sum(need.total * need.count for need in needs.values())
    assert with_spares_that_fit(config, list(needs.values()), ["x"], host=total) == (config, ["x"])
    fitting, (_, line) = with_spares_that_fit(config, list(needs.values()), ["x"], host=total - 1)
    assert fitting == replace(config, generator=replace(config.generator, spares=0))
    assert "--generator.spares 0" in line
