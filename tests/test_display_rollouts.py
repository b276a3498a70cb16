"""The display of what is waited for, of rollouts and of updates."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from rich.cells import cell_len

from forge_rl.metrics import RolloutStatus
from forge_rl.types import Batch, Episode, Group, Outcome, Score, Task, Turn
from tests.test_display import STATUS, STEP, Bench, busy_run, poll_for


def test_what_is_waited_for_is_told_when_nothing_has_moved_for_ten_seconds() -> None:
    bench = Bench(mode="none")
    with bench.phases.phase("train"):
        bench.display.poll()
        poll_for(bench, 9)
        assert "waiting" not in bench.text()
        poll_for(bench, 1, text="trainer, call step for 10 s")
        assert "waiting trainer, call step for 10 s; 10.0s without progress" in bench.text()
        poll_for(bench, 30, text="trainer, call step for 40 s")
        assert "trainer, call step for 40 s; 40.0s without progress" in bench.text()
        poll_for(bench, 1, text="")
        assert "waiting" not in bench.text()


@pytest.mark.parametrize("moved", ["phase", "group", "step", "service", "job"])
def test_anything_that_moves_ends_the_wait(moved: str) -> None:
    bench, status = Bench(mode="none"), STATUS
    with contextlib.ExitStack() as phase:
        phase.enter_context(bench.phases.phase("train"))
        poll_for(bench, 12, status=status)
        assert "generator/1; 11.0s without progress" in bench.text()
        match moved:
            case "phase":
                phase.close()
                phase.enter_context(bench.phases.phase("train"))
            case "group":
                status = replace(status, groups_done=3)
            case "step":
                bench.display.log(1, {})
            case "service":
                bench.display.startup("generator", "starting")
            case "job":
                bench.display.progress("load", 0.5)
        poll_for(bench, 1, status=status)
        assert "without progress" not in bench.text()
        poll_for(bench, 10, status=status)
        assert "generator/1; 10.0s without progress" in bench.text()


def test_plain_mode_reports_an_abnormal_wait_every_thirty_seconds() -> None:
    bench = Bench()
    with bench.phases.phase("publish"):
        bench.display.poll()
        poll_for(bench, 125)
    assert bench.lines()[1:] == [
        f"publish: waiting for generator/1; {passed} without progress" for passed in ("1:00", "1:30", "2:00")
    ]
    bench.display.log(1, {"seconds/train": 70.0})
    with bench.phases.phase("train"):
        bench.display.poll()
        poll_for(bench, 139)
        assert "train: waiting" not in bench.lines()[-1], "a step took 70 s before"
        poll_for(bench, 1)
    assert bench.lines()[-1] == "train: waiting for generator/1; 2:20 without progress"


def test_a_batch_that_was_ready_has_no_rate() -> None:
    bench = Bench()
    bench.display.log(1, {"seconds/rollout": 0.001, "tokens_per_s/rollout": 314e3})
    assert bench.lines()[-1].endswith("rollout 0.00s")


def test_plain_mode_reports_a_long_rollout_every_thirty_seconds() -> None:
    bench = Bench()
    with bench.phases.phase("rollout"):
        for done in range(64):
            poll_for(bench, 1, status=replace(STATUS, groups_done=done))
    assert bench.lines()[1:] == [
        f"rollout: batch 7: groups {done}/8, decoding 12, in tools 9, queued 30, engines 7/8, lag up to 2"
        for done in (29, 59)
    ]


def test_plain_mode_says_nothing_of_short_rollouts() -> None:
    bench = Bench()
    for phase, seconds in (("rollout", 29), ("train", 64)):
        with bench.phases.phase(phase):
            for done in range(seconds):
                poll_for(bench, 1, status=replace(STATUS, groups_done=done))
    assert len(bench.lines()) == 1


@pytest.mark.parametrize("width", [40, 80, 140])
def test_the_panel_shows_the_rollouts_at_every_width(width: int) -> None:
    bench = busy_run(width, height=60)
    bench.display.log(19, STEP | {"busy_rollout/generator/0": 0.97, "busy_rollout/generator/1": 0.5})
    with bench.phases.phase("rollout"):
        poll_for(bench, 12, status=STATUS)
        lines = bench.panel()
    assert len({cell_len(line) for line in lines}) == 1
    text = bench.text()
    parts = ("batch 7", "2/8", "groups 2/8", "decoding 12", "in tools 9", "queued 30", "engines 7/8", "lag up to 2")
    for part in (*parts, "25% (rollout 74%)", "generator/1; 11.0s without progress"):
        assert part in text, f"{part!r} is not in\n{text}"
    bench.display.close()
    assert "batch" not in bench.text()


def test_each_batch_has_a_bar_of_its_own() -> None:
    bench = Bench(mode="none")
    poll_for(bench, 5, status=replace(STATUS, groups_done=8))
    assert "100% 0:00:00 8/8" in bench.text()
    poll_for(bench, 3, status=replace(STATUS, batch=8, groups_done=1))
    assert "12% 0:00:02 1/8" in bench.text()


def test_a_blocked_event_loop_is_told_by_the_drawing_thread() -> None:
    bench = Bench(mode="none")
    bench.seconds += 60.0
    assert not any("event loop" in line for line in bench.panel())
    poll_for(bench, 20)
    bench.seconds += 9.0
    assert not any("event loop" in line for line in bench.panel())
    bench.seconds += 3.0
    text = "\n".join(bench.panel())
    assert "the controller, whose event loop has been blocked for 12.0s" in text
    assert "generator/1" not in text


async def test_the_display_watches_until_cancelled() -> None:
    looked = asyncio.Event()

    def status() -> RolloutStatus:
        looked.set()
        return STATUS

    bench = Bench(mode="none")
    watching = asyncio.ensure_future(bench.display.watch(waiting=str, status=status))
    await asyncio.wait_for(looked.wait(), 60)
    assert "batch 7" in bench.text()
    watching.cancel()
    await asyncio.wait([watching])
    assert "batch 7" not in bench.text()


class Pausing:
    """A pause that the test begins and ends."""

    paused, lasts_s = True, 65.0


def test_the_panel_shows_a_pause_while_it_lasts_and_no_call_as_stalled() -> None:
    bench = Bench(mode="none")
    pause = Pausing()
    bench.display.pause(pause)
    for _ in range(3):
        bench.seconds += 60
        bench.display.poll(waiting=lambda: "generator replica 0, call load")
    assert "paused for 1:05; attach to the folder and resume() to continue" in bench.text()
    assert "call load" not in bench.text()
    pause.paused = False
    assert "resume()" not in bench.text()


def test_the_panel_shows_the_progress_of_an_update_until_it_ends() -> None:
    bench = Bench(mode="none")
    bench.display.poll(training=lambda: (3, 12))
    assert "25%" in bench.text()
    assert "3/12 microbatches" in bench.text()
    bench.display.poll()
    assert "microbatches" not in bench.text()


def test_the_panel_shows_an_answer_as_plain_text_and_reward_parts() -> None:
    bench = Bench(mode="none", width=100, height=60)
    task = Task(id="7", source="sums", messages=({"role": "user", "content": "?"},), truth={})
    turn = Turn(
        prompt_ids=(1,),
        token_ids=(2,),
        logprobs=(-1.0,),
        versions=(0,),
        text="first \x1b[2J[red]line[/red]\nsecond " + "z" * 1000,
    )
    episode = Episode(task=task, turns=(turn,), outcome=Outcome.COMPLETED, score=Score(total=0.5))
    values = {"reward/mean": 0.5, "reward/std": 0.1, "reward/sums": 0.7, "reward_parts/format": 0.25}
    bench.display.log(1, values, Batch(groups=(Group(task=task, episodes=(episode,)),), version=1))
    text = bench.text()
    for expected_text in ("sums, 7, reward 0.5:", "[red]line[/red] second zzz", "format 0.25", "sources sums 0.7"):
        assert expected_text in text, text
    assert "\x1b[2J" not in text
    assert text.count("z") < 300
    assert "std 0.1" not in text
