"""The display, drawn to a string at several widths, and once on a real pseudo-terminal."""

import asyncio
import contextlib
import io
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from forge_rl.errors import ConfigError
from forge_rl.metrics import Display, Mode, PhaseClock, RolloutStatus, RunInfo

STEP = {
    "reward/mean": 0.4531,
    "loss": -0.0123,
    "logprob_gap": 0.00041,
    "grad_norm": 0.812,
    "seconds/rollout": 2.1,
    "tokens_per_s/rollout": 512.0,
    "seconds/train": 6.0,
    "tokens_per_s/train": 310.0,
    "seconds/publish": 0.9,
    "seconds/step": 9.5,
    "busy/trainer": 0.62,
    "busy/generator/0": 0.25,
}


@dataclass
class Bench:
    """A display on a string, with a clock that the test moves."""

    mode: Mode = "plain"
    width: int = 80
    height: int = 24
    seconds: float = 0.0
    resumed: int = 0
    file: io.StringIO = field(default_factory=io.StringIO)

    def __post_init__(self) -> None:
        self.console = Console(file=self.file, width=self.width, height=self.height, highlight=False)
        self.phases = PhaseClock(lambda: self.seconds)
        self.display = Display(self.mode, phase_clock=self.phases, console=self.console, clock=lambda: self.seconds)
        self.display.start(
            RunInfo(recipe="grpo", model="smollm2-135m", folder=Path("/runs/a"), steps=20, step=self.resumed)
        )

    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()

    def panel(self) -> list[str]:
        """The live panel as it would be drawn now."""
        with self.console.capture() as capture:
            self.console.print(self.display.panel)
        return capture.get().splitlines()

    def text(self) -> str:
        """The live panel's words, however they are broken into lines."""
        return " ".join(" ".join(line.strip("│ ") for line in self.panel()).split())


def busy_run(width: int, height: int = 24) -> Bench:
    bench = Bench(mode="none", width=width, height=height)
    display = bench.display
    with bench.phases.phase("evaluate"):
        bench.seconds += 1.0
    bench.phases.finish_step()
    display.log(0, {"held_out": 0.5})
    for step in range(1, 31):
        display.log(min(step, 19), STEP | {"reward/mean": step / 40})
    display.log(19, {"held_out": 0.91})
    display.startup("generator/1", "starting", "loads version 18, on the second device of the host")
    display.progress("dequantise", 0.5)
    for i in range(7):
        display.event(f"event {i}: " + "something that takes many words to tell " * 4)
    display.event("a replica gave no sign of life [red]not markup[/red]", "fault")
    display.event("equal rewards", "warning")
    return bench


@pytest.mark.parametrize("width", [20, 40, 80, 140])
def test_no_line_of_the_panel_overflows(width: int) -> None:
    bench = busy_run(width)
    with bench.phases.phase("rollout"):
        bench.seconds += 75.0
        lines = bench.panel()
    assert max(cell_len(line) for line in lines) == min(width, 100)
    assert len({cell_len(line) for line in lines}) == 1


@pytest.mark.parametrize("width", [40, 80, 140])
def test_the_panel_shows_the_numbers_at_every_width(width: int) -> None:
    bench = busy_run(width, height=60)
    with bench.phases.phase("rollout"):
        bench.seconds += 75.0
        text = bench.text()
    for expected_text in (
        "grpo · smollm2-135m",
        "/runs/a",
        "19/20",
        "eta 0.00s",
        "rollout 1:15",
        "elapsed 1:16",
        "0.750",
        "min 0.03 max 0.75",
        "█",
        "0.50 → 0.91",
        "loss -0.0123",
        "gap 0.00041",
        "grad 0.812",
        "rollout 2.1s 512 tok/s",
        "train 6.0s 310 tok/s",
        "publish 0.9s",
        "trainer 62%",
        "generator 25%",
        "0:01:15",
        "faults 1",
        "warnings 1",
    ):
        assert expected_text in text, f"{expected_text!r} is not in\n{text}"
    assert ("generator/1" in text and "dequantise" in text) or width < 80


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_panel_of_an_ordinary_run_fits_a_terminal_of_24_lines(width: int) -> None:
    bench = Bench(mode="none", width=width)
    bench.display.log(0, {"held_out": 0.5})
    for step in range(1, 10):
        bench.display.log(step, STEP)
    for _ in range(9):
        bench.display.event("something that takes many words to tell " * 4, "warning")
    with bench.phases.phase("train"):
        poll_for(bench, 12, status=STATUS)
        lines = bench.panel()
    assert len(lines) <= 24
    assert any("warnings 9" in line for line in lines)


def test_services_are_shown_until_the_first_phase_begins() -> None:
    bench = Bench(mode="none")
    bench.display.startup("trainer", "starting", "1 rank")
    bench.display.startup("generator", "starting")
    bench.seconds += 3.0
    bench.display.startup("trainer", "ready", "1 rank")
    bench.seconds += 2.0
    trainer, generator = (line for line in bench.panel() if "trainer" in line or "generator" in line)
    assert "100% 0:00:03 1 rank" in trainer
    assert "100%" not in generator
    assert "0:00:05" in generator
    bench.display.startup("generator", "ready")
    with bench.phases.phase("rollout"):
        text = bench.text()
    assert "generator" not in text
    assert "trainer" not in text


def test_a_service_that_fails_to_start_is_told_and_its_bar_vanishes() -> None:
    bench = Bench()
    bench.display.startup("reward", "starting")
    bench.seconds += 2.0
    bench.display.startup("reward", "failed", "no module named x")
    assert bench.lines()[-1] == "reward failed after 2.0s  no module named x"
    assert "reward" not in bench.text()


def test_a_service_that_starts_again_is_timed_anew() -> None:
    bench = Bench()
    bench.display.startup("generator", "starting")
    bench.seconds += 4.0
    bench.display.startup("generator", "ready")
    bench.seconds += 50.0
    bench.display.startup("generator", "starting", "again")
    bench.seconds += 2.0
    bench.display.startup("generator", "ready")
    assert bench.lines()[1:] == [
        "generator starting",
        "generator ready in 4.0s",
        "generator starting  again",
        "generator ready in 2.0s",
    ]


def test_the_devices_of_a_service_are_one_mean_and_its_range() -> None:
    bench = Bench(mode="none", width=100)
    bench.display.log(1, {f"busy/generator/{i}": share for i, share in enumerate((0.2, 0.4, 0.6, 0.8, 1.0))})
    assert "generator x5 60% (20% to 100%)" in bench.text()


def test_a_step_in_plain_mode_is_one_line() -> None:
    bench = Bench(width=40)
    bench.display.log(3, STEP)
    assert bench.lines()[-1] == (
        "step  3/20  reward 0.453  loss -0.0123  gap 0.00041  grad 0.812  rollout 2.1s 512 tok/s  "
        "train 6.0s 310 tok/s  publish 0.9s  eta 2:42"
    )


def test_the_title_and_held_out_scores_in_plain_mode() -> None:
    bench = Bench(resumed=2)
    bench.display.log(2, {"held_out": 0.5, "held_out/gsm8k": 0.25, "eval/held_out/avg@1": 0.5})
    assert bench.lines() == [
        "grpo  smollm2-135m  /runs/a  20 steps  resumed after step 2",
        "step  2/20  held-out 0.5  held-out gsm8k 0.25",
    ]


def test_of_several_sets_each_has_its_score_also_where_it_comes_late() -> None:
    bench = Bench()
    for step in (1, 2):
        bench.display.log(step, {"reward/mean": 0.5})
    named = {
        "eval/maths/avg@4": 0.5,
        "eval/maths/avg@4_stderr": 0.1,
        "eval/maths/pass@4": 0.9,
        "eval/maths/a/avg@4": 0.6,
    }
    bench.display.log(1, {**named, "eval/words/avg@4": 0.25})
    assert bench.lines()[-1] == "step  1/20  held-out maths 0.5  held-out words 0.25"
    assert bench.display._state.step == 2


def test_the_eta_is_the_median_of_recent_steps_times_the_steps_left() -> None:
    bench = Bench()
    for step, seconds in enumerate((10.0, 12.0, 500.0), 1):
        bench.display.log(step, {"seconds/step": seconds})
    assert bench.lines()[-1].endswith("eta 3:24")  # 12 s times 17
    for passed, eta in ((5.0, "3:19"), (50.0, "3:12")):
        bench.phases.finish_step()
        with bench.phases.phase("train"):
            bench.seconds += passed
            assert f"eta {eta}" in bench.text()


def test_the_time_before_the_first_step_is_no_step() -> None:
    bench = Bench()
    bench.display.log(0, {"seconds/step": 300.0})
    assert "eta" not in bench.lines()[-1]


def test_progress_in_plain_mode_is_a_line_a_quarter() -> None:
    bench = Bench()
    for i in range(101):
        bench.display.progress("dequantise", i / 100)
    assert bench.lines()[1:] == [f"dequantise {percent}%" for percent in (0, 25, 50, 75, 100)]
    assert "100%" in bench.text()


def test_events_in_plain_mode() -> None:
    bench = Bench()
    bench.display.event("mixture changed [math 0.7]")
    bench.display.event("equal rewards", "warning")
    bench.display.event("generator/1 died", "fault")
    assert bench.lines()[1:] == [
        "mixture changed [math 0.7]",
        "warning: equal rewards",
        "fault: generator/1 died",
    ]


STATUS = RolloutStatus(
    batch=7,
    groups_done=2,
    groups=8,
    episodes_running=12,
    episodes_waiting=9,
    queue=30,
    engines_serving=7,
    engines=8,
    lag_max=2,
)


def poll_for(bench: Bench, seconds: int, *, status: RolloutStatus | None = None, text: str = "generator/1") -> None:
    """Poll once a second, as the run does."""
    for _ in range(seconds):
        bench.seconds += 1.0
        bench.display.poll(waiting=lambda: text, status=lambda: status)


def test_none_writes_nothing() -> None:
    bench = Bench(mode="none")
    bench.display.startup("trainer", "ready")
    bench.display.log(1, STEP)
    bench.display.event("x", "fault")
    bench.display.summary()
    assert bench.file.getvalue() == ""


def test_live_needs_a_terminal_and_auto_is_plain_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # CI services set this; rich then believes that any file is a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console(file=io.StringIO())
    with pytest.raises(ConfigError, match="needs a terminal"):
        Display("live", phase_clock=PhaseClock(), console=console)
    assert Display("auto", phase_clock=PhaseClock(), console=console).mode == "plain"


def test_letters_that_a_terminal_lacks_are_replaced() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    display = Display("plain", phase_clock=PhaseClock(), console=Console(file=file, width=80))
    display.log(0, {"held_out": 0.5})
    display.log(1, {"held_out": 0.75})
    display.event("déjà vu")
    display.summary()
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "held-out   0.50 -> 0.75 (+0.25)" in text
    assert "d?j? vu" in text


def test_live_on_a_terminal_draws_the_panel_and_prints_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    read, write = os.openpty()
    with open(write, "w", encoding="utf-8") as terminal:
        console = Console(file=terminal, width=80, height=24, highlight=False)
        phases = PhaseClock()
        display = Display(phase_clock=phases, console=console)
        assert display.mode == "live"
        display.start(RunInfo(recipe="grpo", model="tiny", folder=Path("/runs/a"), steps=20))
        display.log(1, STEP)
        print("a line from elsewhere")
        display.event("generator/1 [died]", "fault")
        display.close()
        display.close()
    output = b""
    while b"\x1b[?25h" not in output:
        output += os.read(read, 65536)
    os.close(read)
    text = output.decode()
    last_panel = text.rindex("grpo · tiny")
    assert text.rindex("a line from elsewhere") < last_panel
    assert text.rindex("fault: generator/1 [died]") < last_panel
    assert text.startswith("\x1b[?25l")


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_display_whose_reader_has_gone_turns_itself_off_and_says_why(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.openpty() if mode == "live" else os.pipe()
    monkeypatch.setenv("TERM", "xterm")
    texts: list[str] = []

    async def until_told(display: Display) -> None:
        def tell(text: str) -> None:
            texts.append(text)
            watching.cancel()

        watching = asyncio.ensure_future(display.watch(waiting=str, status=lambda: None, tell=tell))
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    with open(writer, "w") as file:
        monkeypatch.setattr("sys.stdout", file)
        display = Display(mode, phase_clock=PhaseClock())
        display.start(RunInfo(recipe="grpo", model="tiny", folder=Path("runs/a"), steps=20))
        os.close(reader)
        display.log(1, STEP)
        display.event("one", "warning")
        asyncio.run(until_told(display))
        display.log(2, STEP)
        display.event("two")
        display.summary({"run folder": "runs/a"})
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            file.close()
    assert len(texts) == 1
    assert texts[0].startswith("nothing more is shown, as stdout cannot be written: [Errno ")


def test_the_reward_of_all_groups_is_shown_where_it_differs() -> None:
    for mode in ("plain", "none"):
        bench = Bench(mode=mode)
        for step, of_all in ((1, 0.45311), (2, 0.857)):
            bench.display.log(step, STEP | {"completed/reward_mean": of_all})
            text = "\n".join(bench.panel() if mode == "none" else bench.lines()[-1:])
            assert ("of all groups 0.857" in text) == (step == 2), text
            assert "of all groups 0.453" not in text
        bench.display.close()
