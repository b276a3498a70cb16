"""The benchmark of numerics: its comparisons by hand, the formats it writes, and one run on a tiny model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import numerics
from forge_rl.types import Turn
from tests.tiny import bundled_folder, make_tiny_model


def turn(ids: list[int], logprobs: list[float]) -> Turn:
    return Turn(prompt_ids=[1], token_ids=ids, logprobs=logprobs, versions=[0] * len(ids), text="")


def test_completions_are_compared_up_to_where_their_tokens_differ() -> None:
    turns = [turn([5, 6, 7], [-1.0, -2.0, -3.0]), turn([5, 6], [-1.0, -1.5])]
    changed_turns = [turn([5, 8, 7], [-1.25, -2.0, -9.0]), turn([5, 6], [-1.0, -1.5])]
    assert numerics._share_equal(turns, turns) == 1
    assert numerics._share_equal(turns, changed_turns) == 0.5
    assert numerics._largest_difference(turns, changed_turns) == 0.25, (
        "from the second token on they are of other texts"
    )
    nearly = [turn([5, 6], [-1.0, math.nextafter(-1.5, 0)]), turn([5, 6], [-1.0, -1.5000001])]
    assert numerics._share_equal([turns[1]] * 2, nearly) == 0.5, "of which the first is the same in float32"


def test_the_effective_sample_size_of_a_hand_worked_gap() -> None:
    summary = numerics._summary(torch.tensor([0.0, math.log(3.0)], dtype=torch.float64))
    assert summary == pytest.approx({"mean_gap": math.log(3) / 2, "max_gap": math.log(3), "equal": 0.5, "ess": 16 / 20})


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.5 / 127), ("fp8", 1 / 16)])
def test_linear_layers_are_rounded_with_a_scale_for_each_output(
    kind: numerics.Format, error: float, tmp_path: Path
) -> None:
    (tmp_path / "from").mkdir()
    torch.manual_seed(0)
    weights = {name: torch.randn(8, 16) for name in ("model.a.q_proj.weight", "lm_head.weight")}
    weights["model.a.q_proj.weight"][3] = 0
    save_file(weights, tmp_path / "from" / "model.safetensors")
    (tmp_path / "from" / "config.json").write_text('{"hidden_size": 16}')
    folder = numerics._quantized(tmp_path / "from", tmp_path / "to", kind)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["lm_head.weight"].equal(weights["lm_head.weight"])
    was, scale = weights["model.a.q_proj.weight"], tensors["model.a.q_proj.weight_scale"]
    assert scale.shape == (8, 1)
    back = tensors["model.a.q_proj.weight"].float() * scale
    assert ((back - was).abs() <= error * was.abs().amax(1, keepdim=True) + 1e-9).all()
    settings = json.loads((folder / "config.json").read_text())
    assert settings["hidden_size"] == 16
    assert settings["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 8


@pytest.mark.nightly
def test_the_benchmark_runs(tmp_path: Path) -> None:
    model, path = make_tiny_model(tmp_path / "model", bundled_folder()), tmp_path / "out.json"
    flags = ["--completions", "4", "--tokens", "8", "--formats", "float32", "int8", "--json", str(path)]
    command = [sys.executable, "-m", "benchmarks.numerics", "--model", str(model), *flags]
    subprocess.run(command, check=True, timeout=600)
    results = json.loads(path.read_text())["results"]
    assert results["repeat_equal_float32"] == 1
    assert results["max_gap_float32_float32"] < 1e-3
    if "mean_gap_int8_float32" in results:  # else vLLM has no kernel for this processor
        assert results["mean_gap_float32_float32"] < results["mean_gap_int8_float32"] < 0.5
