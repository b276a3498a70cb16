"""A whole run with flags that promise an effect: the metric of each is above zero."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.commands import Command, metrics, tiny_run

pytestmark = pytest.mark.processes

REWARD = """
import asyncio
import zlib

async def half_of_the_tasks_teach(task, text):
    digest = zlib.crc32(task.id.encode())
    if digest % 3 == 0:
        await asyncio.sleep(2)  # a straggler
    if digest % 2:
        return 0.5
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_flags_promise_is_above_zero_in_a_run(commands: list[Command], tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    out = tmp_path / "run"
    flags = ("--reward", f"{tmp_path}/mine.py:half_of_the_tasks_teach", "--steps", "100000", "--evaluation.every", "0")
    flags += ("--schedule.dynamic-sampling", "--schedule.over-sampling", "2", "--schedule.max-lag", "2")
    flags += ("--generator.spares", "1", "--generator.max-num-seqs", "6", "--generator.max-tokens", "32")
    flags += ("--generator.dtype", "bfloat16", "--weights.mirror", f"file://{tmp_path}/versions")
    flags += ("--data.system", "Answer with letters, please. " * 20, "--checkpoint-every", "0")
    command = tiny_run(commands, tiny_model, out, *flags)
    command.wait_for("step +2/")
    missing = {"groups/replaced_uniform", "groups/overtaken", "generator/spares"}
    missing |= {"generator/prefix_hits", "generator/prefilled_again", "weights/mirrored_share"}

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
