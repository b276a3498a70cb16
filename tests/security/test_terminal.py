"""What models, agents, worlds and files wrote does nothing to a terminal that shows it."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from forge_rl.errors import Fault, ForgeError
from forge_rl.harness.score_tables import print_scores
from forge_rl.metrics import Display, PhaseClock, RunInfo
from forge_rl.run.live.attach import Events
from forge_rl.system.terminal import visible
from forge_rl.types import Batch, Episode, Group, Score, Task, ToolCall, Turn
from tests.security.other_user import ROOT

EVIL = (
    "raised \x1b]52;c;cm0gLXJmIH4=\x07 \x1b]0;owned\x07 \x1b[2J \x9b31m \x1b]8;;http://a.example\x1b\\ \b\r \x7f "
    "\u202egnp.exe\u2066 \u2028 \U000e0041 [bold red]no markup[/bold red] [link=http://a.example]here[/link]"
)
ACTS = "\x1b\x07\x9b\b\r\x7f\u202e\u2066\u2028\U000e0041"


def unharmed(text: str) -> bool:
    """True if the text is there, with nothing that acts on a terminal."""
    flat = "".join(text.split())
    return not set(text) & set(ACTS) and "[boldred]nomarkup[/boldred]" in flat and "[link=http://a.example]" in flat


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def console() -> Console:
    # Without colours, whose codes are rich's own.
    return Console(file=Terminal(), force_terminal=True, highlight=False, markup=True, color_system=None, width=400)


def test_escapes_are_written_out_and_letters_of_all_languages_stay():
    assert visible("\x1b[2J\x9b1m \u202e \U000e0041 \ud800") == r"\x1b[2J\x9b1m \u202e \U000e0041 \ud800"
    harmless_text = "línea uno\n\t三 شكرا 👩‍🚀 naïve [red] \\x1b"
    assert visible(harmless_text) == harmless_text


def test_events_and_the_table_of_faults_are_text():
    out = console()
    display = Display("plain", phase_clock=PhaseClock(), console=out)
    display.start(RunInfo(recipe="grpo", model=EVIL, folder=Path("runs/a"), steps=1))
    for level in ("info", "warning", "fault"):
        display.event(EVIL, level)
    display.startup("engine", "failed", EVIL)
    display.log(1, {f"eval/{EVIL}": 0.5})
    fault = Fault(service=EVIL, replica=None, cause=EVIL, phase="train", at_s=1.0)
    display.summary({"folder": EVIL}, [fault])
    output = out.file.getvalue()
    assert unharmed(output)
    assert output.count("[bold red]no markup[/bold red]") >= 7


def test_the_live_panel_is_text():
    out = console()
    display = Display("live", phase_clock=PhaseClock(), console=Console(file=Terminal(), force_terminal=True))
    evil = "\x1b[2J \x9b \u202e [red]text[/red]"
    display._state.waiting = evil, 0.0
    display.panel.show("engine", 0.5, evil)
    out.print(display.panel)
    assert not set(out.file.getvalue()) & set(ACTS)
    assert out.file.getvalue().count("[red]text[/red]") == 2


def test_what_an_attached_run_shows_is_text():
    task = Task(id=EVIL, source=EVIL, messages=({"role": EVIL, "content": EVIL},), truth={EVIL: EVIL})
    evil_call = ToolCall(id="1", name=EVIL, arguments=EVIL)
    none: dict[str, Any] = dict.fromkeys(("prompt_ids", "token_ids", "logprobs", "versions"), ())
    turn = Turn(**none, text=EVIL, messages=task.messages, calls=(evil_call,))
    episode = Episode(task=task, turns=(turn,), score=Score(total=1.0, parts={EVIL: 1.0}), output=EVIL, problem=EVIL)
    group = Group(task=task, episodes=(episode,))
    for value in (turn, episode, group, Batch(groups=(group,), version=1)):
        assert not set(repr(value)) & set(ACTS)
    event = {"time": 0, "level": "warning", "text": f"{EVIL}\n00:00:00  info     all is well"}
    assert unharmed(repr(Events([event])))
    assert len([line for line in repr(Events([event])).splitlines() if not line.startswith(" ")]) == 1


def test_scores_of_models_with_strange_names_are_text():
    out = Console(file=Terminal(), force_terminal=True, markup=False, color_system=None, width=400)
    print_scores(out, {EVIL: {EVIL: {"avg@1": 0.5, "avg@1_error": 0.1, "episodes": 2}}})
    assert unharmed(out.file.getvalue())


def test_an_error_that_quotes_a_model_is_text(tmp_path: Path):
    assert unharmed(str(ForgeError(EVIL, hint=EVIL)))
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys; from dataclasses import dataclass; from forge_rl.errors import ForgeError\n"
        "from forge_rl.run.launch import launch\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Config: steps: int = 1\n"
        f"async def main(config): raise ForgeError(json.loads({json.dumps(EVIL)!r}), hint='look')\n"
        "launch(Config, main, args=[])"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert unharmed(done.stderr), done.stderr
