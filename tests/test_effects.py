"""A whole run with flags that promise an effect: the metric of each is above zero."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from forge_rl.sandbox import SandboxError
from forge_rl.sandbox.shared import check_shared_pool
from tests.commands import Command, metrics, tiny_run
from tests.seeded_answers import EAGER
from tests.tiny import make_run_model

pytestmark = pytest.mark.processes

REWARD = """
import asyncio
import zlib

async def half_of_the_tasks_teach(task, text):
    digest = zlib.crc32(task.id.encode())
    if digest % 3 == 0:
        await asyncio.sleep(2)  # a straggler
    if digest % 2:
        return 1.0
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))
"""

WORLD = """
from dataclasses import dataclass

import forge_rl
from forge_rl.envs.compaction import DropOldOutputs
from forge_rl.envs.tools import ToolEnv
from forge_rl.sandbox import Limits, run_code
from forge_rl.types import Episode, ToolCall

@forge_rl.tool(pure=True, version="1")
def look_up(word: str) -> str:
    '''Look up a word.'''
    return " ".join([word] * 30)

@dataclass(frozen=True)
class Calling:
    '''Takes whatever the model writes for a call.'''

    tools: ToolEnv

    def __call__(self, task):
        use = self.tools(task)
        step = use.step

        async def calling(completion, *, truncated, calls):
            call = ToolCall(id="call00001", name="look_up", arguments='{"word": "tea"}')
            return await step(completion, truncated=False, calls=(call,))

        use.step = calling
        return use

world = Calling(ToolEnv([look_up], max_turns=4, cache="", compact=DropOldOutputs(above_chars=100, keep=1)))

async def runs_code(task, episode: Episode):
    limits = Limits(wall_s=7.0)
    result = await run_code(repr(sum(turn.text.count("e") for turn in episode.turns)), limits=limits)
    return float(result.value)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_effects_of_tools_code_rewards_and_drafts_are_above_zero_in_a_run(
    commands: list[Command], run_model: Path, tmp_path: Path
) -> None:
    try:
        check_shared_pool()
    except SandboxError as error:
        pytest.skip(str(error))
    (tmp_path / "mine.py").write_text(WORLD)
    out = tmp_path / "run"
    flags = ("--env", f"{tmp_path}/mine.py:world", "--reward", f"{tmp_path}/mine.py:runs_code", "--steps", "3")
    flags += ("--evaluation.every", "0", "--checkpoint-every", "0", "--generator.max-tokens", "8")
    flags += ("--tasks", "chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1")
    # Colder, a random model repeats itself.
    flags += ("--generator.speculation", f"suffix:{EAGER}", "--generator.temperature", "0.1")
    command = tiny_run(commands, run_model, out, *flags, "--generator.max-model-len", "512")
    assert command.end(300) == 0, command.output
    rows = metrics(out)
    effects = ("tools/cache_hits", "sandbox/warm", "rollout/drafted", "rollout/accepted")
    for name, minimum in (*dict.fromkeys(effects, 0).items(), ("episodes/segments", 1)):
        assert max(row.get(name, 0.0) for row in rows) > minimum, (name, rows)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_flags_promise_is_above_zero_in_a_run(commands: list[Command], run_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    for name, sign in (("sums", 1), ("differences", -1)):
        rows = [{"question": f"What is {number} {sign:+}?", "answer": str(number + sign)} for number in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    flags = ("--tasks", f"{tmp_path}/sums.jsonl", f"{tmp_path}/differences.jsonl", "--mixture.adapt", "success")
    flags += ("--curriculum.pools", "solve_rate", "--data.held-out-share", "0.1")
    flags += ("--reward", f"{tmp_path}/mine.py:half_of_the_tasks_teach", "--steps", "100000", "--evaluation.every", "0")
    flags += ("--schedule.dynamic-sampling", "--schedule.over-sampling", "2", "--schedule.max-lag", "2")
    flags += ("--generator.spares", "1", "--generator.max-num-seqs", "6", "--generator.max-tokens", "32")
    flags += ("--generator.dtype", "bfloat16", "--generator.quantization", "fp8")
    flags += ("--weights.mirror", f"file://{tmp_path}/versions")
    flags += ("--data.system", "Answer with letters, please. " * 20, "--checkpoint-every", "0")
    command = tiny_run(commands, run_model, out, *flags)
    command.wait_for("step +2/")
    missing = {"groups/replaced_uniform", "groups/overtaken", "generator/spares", "curriculum/passed_over"}
    missing |= {"data/mixture_shift", "generator/prefix_hits", "generator/prefilled_again", "weights/mirrored_share"}

    until = time.monotonic() + 300
    while missing:
        assert command.process.poll() is None, command.output
        assert time.monotonic() < until, (missing, command.output)
        time.sleep(0.5)
        missing -= {name for row in metrics(out) for name in missing if row.get(name, 0.0) > 0}
    command.process.send_signal(signal.SIGINT)
    assert command.end(120) == 130, command.output
    rows = [row for row in metrics(out) if "tokens/packed" in row]
    assert all(row["tokens/packed"] < row["tokens/train"] for row in rows)
    assert min(row.get("weights/mirrored_share", 1.0) for row in rows) < 1, "later versions are written as changes"
    tensors = load_file(run_model / "model.safetensors")
    linear_weights = sum(values.numel() for name, values in tensors.items() if "_proj" in name)
    assert {row["generator/quantized_bytes"] for row in rows} == {linear_weights}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_effects_of_flags_for_experts_are_above_zero_in_a_run(commands: list[Command], tmp_path: Path) -> None:
    config = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
    model = make_run_model(tmp_path, family="qwen3_moe", **config)
    out = tmp_path / "run"
    flags = ("--steps", "2", "--groups-per-batch", "4", "--evaluation.every", "0", "--checkpoint-every", "0")
    flags += ("--trainer.expert-parallel-degree", "2", "--trainer.expert-balance", "least_loaded")
    command = tiny_run(commands, model, out, *flags, "--trainer.router-replay")
    assert command.end(400) == 0, command.output
    rows = [row for row in metrics(out) if "experts/replayed" in row]
    assert {row["experts/replayed"] for row in rows} == {1.0}
    loads = [(row["experts/rank_max_over_mean/plain"], row["experts/rank_max_over_mean"]) for row in rows]
    assert any(plain > lent for plain, lent in loads), ("experts were lent", loads)
