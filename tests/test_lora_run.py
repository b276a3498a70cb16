"""Whole runs with adapters: every version is attested, and what is saved goes on, merges, and is read by peft."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from forge_rl.models.resolve import resolve_model
from tests.commands import Command, metrics, tiny_flags, tiny_run
from tests.test_run import run_here
from tests.tiny import bundled_folder, make_tiny_model
from tests.zoo.folders import write

pytestmark = pytest.mark.long
LORA = ("--lora.rank", "4", "--evaluation.every", "0", "--checkpoint-every", "2")
ROWS = [
    {"prompt": f"What is {n} + 3?", "chosen": str(n + 3), "rejected": "none", "question": f"{n} + 3?", "answer": str(n)}
    for n in range(1, 33)
]


def factors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model" / "adapter_model.safetensors")


@pytest.mark.timeout(1800)
def test_a_run_publishes_adapters_goes_on_and_leaves_an_adapter(
    commands: list[Command],
    run_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    out = tmp_path / "run"
    flags = (*LORA, "--schedule.kind", "synchronous")
    command = tiny_run(commands, run_model, out, *flags, "--steps", "2")
    assert command.end(600) == 0, command.output
    assert "LoRA of rank 4 on all-linear" in command.output
    assert "chosen: --trainer.optimizer.lr 0.0003: 3e-05 for models up to" in command.output
    resumed_command = tiny_run(commands, run_model, out, *flags, "--steps", "4")
    assert resumed_command.end(600) == 0, resumed_command.output
    assert "continued from" in resumed_command.output
    gaps = {row["step"]: row["logprob_gap"] for row in metrics(out) if "logprob_gap" in row}
    assert gaps.keys() == {1, 2, 3, 4}
    assert max(gaps.values()) < 1e-3, "engines sample from what the trainer trains"
    shares = [row["weights/written_share"] for row in metrics(out) if "weights/written_share" in row]
    assert min(shares) < 0.02, "versions after the first are adapters alone"
    first, second = (out / "checkpoints" / f"step-{step:06d}" for step in (2, 4))
    assert json.loads((second / "controller.json").read_text())["choices"]["trainer.optimizer.lr"] == 3e-4
    moved = [float((values - factors_of(first)[name]).norm()) for name, values in factors_of(second).items()]
    assert min(moved) > 0, "resumed adapters are trained on"
    assert (
        sum(path.stat().st_size for path in second.rglob("*.distcp"))
        < run_model.joinpath("model.safetensors").stat().st_size / 10
    )
    _check_merged(run_model, second, tmp_path / "merged", monkeypatch)
    resolved = resolve_model(str(second), tmp_path / "cache")
    assert load_file(resolved / "model.safetensors").keys() == load_file(run_model / "model.safetensors").keys()
    other_rank = (*tiny_flags(run_model, out), *flags, "--lora.rank", "8", "--steps", "6")
    assert run_here("tests.tiny", *other_rank, monkeypatch=monkeypatch) == 1
    assert "--lora.rank was 4, is 8" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_trains_over_a_quantized_base_that_engines_sample_from_and_goes_on(
    commands: list[Command], tiny_model: Path, tmp_path: Path
):
    out, flags = tmp_path / "run", (*LORA, "--lora.base-format", "nf4", "--weights.probes", "2")
    command = tiny_run(commands, tiny_model, out, *flags, "--steps", "2")
    assert command.end(800) == 0, command.output
    assert "the model's own weights are frozen, linear layers held in nf4" in command.output
    resumed_run = tiny_run(commands, tiny_model, out, *flags, "--steps", "3")
    assert resumed_run.end(800) == 0, resumed_run.output
    assert "continued from" in resumed_run.output
    rows = metrics(out)
    assert max(row["logprob_gap"] for row in rows if "logprob_gap" in row) < 1e-3
    assert max(row["weights/probe_gap"] for row in rows if "weights/probe_gap" in row) < 1e-3
    base, merged = (
        load_file(folder / "model.safetensors")
        for folder in (tiny_model, resolve_model(str(out / "checkpoints" / "step-000002"), tmp_path / "cache"))
    )
    matrices = [values.shape for name, values in base.items() if name.endswith("_proj.weight")]
    full_bytes = sum(4 * values.numel() for values in base.values())
    base_bytes = full_bytes + sum(outputs * (36 * -(-inputs // 64) - 4 * inputs) for outputs, inputs in matrices)
    assert [row["lora/base_bytes"] for row in rows if "loss" in row] == [base_bytes] * 3
    assert [row["lora/base_share"] for row in rows if "loss" in row] == [pytest.approx(base_bytes / full_bytes)] * 3
    assert {name for name, values in merged.items() if not values.equal(base[name])} == {
        name for name in base if name.endswith("_proj.weight")
    }
    other = tiny_run(commands, tiny_model, out, *LORA, "--lora.base-format", "fp8", "--steps", "4")
    assert other.end(120) != 0
    assert "--lora.base-format was 'nf4', is 'fp8'" in other.output


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_trains_experts_and_the_head_and_goes_on(
    commands: list[Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every version is attested by the engines, which the gap to the trainer shows too."""
    sizes = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = make_tiny_model(tmp_path / "model", bundled_folder(), tied=False, family="qwen3_moe", **sizes)
    out, flags = tmp_path / "run", (*LORA, "--lora.targets", "all-linear", "experts", "lm_head")
    command = tiny_run(commands, model, out, *flags, "--steps", "2")
    assert command.end(800) == 0, command.output
    assert "LoRA of rank 4 on all-linear experts lm_head" in command.output
    resumed_run = tiny_run(commands, model, out, *flags, "--steps", "4")
    assert resumed_run.end(800) == 0, resumed_run.output
    assert "continued from" in resumed_run.output
    assert max(row["logprob_gap"] for row in metrics(out) if "logprob_gap" in row) < 1e-3
    assert min(row["weights/written_share"] for row in metrics(out) if "weights/written_share" in row) < 0.1
    first, second = (out / "checkpoints" / f"step-{step:06d}" for step in (2, 4))
    moved = {name: float((values - factors_of(first)[name]).norm()) for name, values in factors_of(second).items()}
    assert min(moved.values()) > 0, "resumed adapters are trained on"
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in moved} >= {"experts", "base_layer", "lm_head"}
    _check_merged(model, second, tmp_path / "merged", monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("recipes.ppo", ("--reward", "tests.tiny:share_of_vowels")),
        ("recipes.distill", ("--teachers.models", "policy", "--hint", "solution")),
    ],
)
@pytest.mark.timeout(900)
def test_other_methods_train_adapters(
    recipe: str, flags: tuple[str, ...], commands: list[Command], tiny_model: Path, tmp_path: Path
):
    out = tmp_path / "run"
    sizes = ("--groups-per-batch", "4", "--group-size", "4", "--steps", "2")
    engines = ("--generator.max-model-len", "256", "--generator.kv-cache-gib", "0.25")
    shared = ("--model", str(tiny_model), "--out", str(out), "--display", "plain")
    command = Command(recipe, *shared, *engines, *LORA, *sizes, *flags, "--schedule.kind", "synchronous")
    commands.append(command)
    assert command.end(600) == 0, command.output
    gaps = [row["logprob_gap"] for row in metrics(out) if "logprob_gap" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-3, "engines sample from what the trainer trains"
    factors = factors_of(out / "checkpoints" / "step-000002")
    assert all(values.any() for name, values in factors.items() if "lora_B" in name)


@pytest.mark.parametrize("recipe", [pytest.param("recipes.sft", marks=pytest.mark.nightly), "recipes.dpo"])
@pytest.mark.timeout(600)
def test_examples_train_adapters(recipe: str, commands: list[Command], tiny_model: Path, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    out, model, targets = tmp_path / "run", tiny_model, ("q_proj", "down_proj")
    arguments = ("--tasks", str(tmp_path / "rows.jsonl"), *LORA, "--trainer.ranks", "2", "--steps", "6")
    if recipe == "recipes.dpo":  # the answers of a pair share a prefix, whose state a branch can compute again
        model, targets = write("ibm-granite/granite-4.0-h-1b", tmp_path / "model"), ("q_proj", "in_proj")
        arguments += ("--trainer.prefix-states", "recomputed")
    command = tiny_run(commands, model, out, *arguments, "--lora.targets", *targets, recipe=recipe)
    assert command.end(300) == 0, command.output
    rows = [row for row in metrics(out) if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    names = {name.split(".")[-3] for name in factors_of(out / "checkpoints" / "step-000006")}
    assert names == {*targets}
    if recipe == "recipes.dpo":
        assert min(row["states/recomputed_tokens"] for row in rows) > 0


def test_the_plan_counts_adapters(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shared = ("--model", str(tiny_model), "--out", str(tmp_path / "run"), "--display", "plain", "--plan")
    engine = ("--generator.max-model-len", "256", "--generator.kv-cache-gib", "0.25", "--loss", "clipped:kl_coef=0.1")
    plans = []
    for flags in ((), ("--lora.rank", "4")):
        assert run_here("recipes.grpo", *shared, *engine, *flags, monkeypatch=monkeypatch) == 0
        plans.append(capsys.readouterr().out)
    assert "LoRA" in plans[1]
    assert "LoRA" not in plans[0]


def _check_merged(base: Path, checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge a checkpoint's adapters into a folder, and compare its logits with peft's of the adapters."""
    from transformers import AutoModelForCausalLM

    assert run_here("apps.merge", str(checkpoint), str(folder), monkeypatch=monkeypatch) == 0
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, checkpoint / "model").eval()
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(token_ids).logits, adapted(token_ids).logits, rtol=1e-4, atol=1e-4)
