"""Show a run's episodes: list and filter them, or print one with all its turns.

forge-rl show runs/grpo-1a2b3c4d --worst 5
forge-rl show runs/grpo-1a2b3c4d 12-trained-7
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tyro
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forge_rl.errors import ConfigError, check_flags
from forge_rl.flags.fields import check_idle
from forge_rl.metrics.display.format import duration, number
from forge_rl.metrics.episode_files import RecordedEpisode
from forge_rl.metrics.episode_reader import EpisodeFile
from forge_rl.metrics.recorder import recorded_files
from forge_rl.run.launch import launch
from forge_rl.system.terminal import clipped, visible
from forge_rl.types import Message, Outcome, Score, Turn

_NUMBERS = ("reward", "advantage", "turns", "tokens", "time")
"""Columns of the list that are aligned to the right."""
_SPARED, _WIDE = ("source", "turns", "tokens", "time"), 110
"""Columns that a screen narrower than this has no room for."""
_SELECTING = ("step", "kind", "source", "task", "outcome", "worst", "most", "whole")
_STYLES = {"system": "dim", "user": "cyan", "tool": "yellow", "assistant": "green", "prompt": "cyan"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Show the episodes that a run has kept, newest step first."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    episode: tyro.conf.Positional[str] = ""
    """Episode to print whole, by its name in the list, such as 12-trained-7."""
    step: int | None = None
    """Only episodes of this step."""
    kind: Literal["", "trained", "evaluated", "failed"] = ""
    """Only trained, evaluated or failed episodes."""
    source: str = ""
    """Only episodes of this source."""
    task: str = ""
    """Only episodes of this task, by a part of its id or question."""
    outcome: str = ""
    """Only episodes that ended like this, such as truncated or judge_error."""
    worst: int = 0
    """Show this many episodes with the lowest rewards, lowest first."""
    most: int = 20
    """Maximum number of episodes to show, without --worst."""
    whole: bool = False
    """Print the episodes whole instead of a list."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"worst": 0, "most": 1})
        if self.outcome and self.outcome not in set(Outcome):
            raise ConfigError(f"no episode ends with {self.outcome!r}", hint=f"choose one of {', '.join(Outcome)}")

    def check_effects(self) -> None:
        """Refuse flags that other arguments rule out.

        Raises:
            ConfigError: names the first of them.
        """
        idle_groups = {
            f"the episode {self.episode} is printed whole": _SELECTING if self.episode else (),
            "--worst says how many are shown": ("most",) if self.worst else (),
        }
        check_idle(self, idle_groups)


async def main(config: Config) -> None:
    """Show the episodes."""
    await asyncio.to_thread(show, config, Console(highlight=False))


def show(config: Config, console: Console) -> None:
    """Read the files and print; see `Config`.

    Raises:
        ForgeError: the run has no such episodes, or a file cannot be read.
    """
    files = recorded_files(config.run)
    if not files:
        hint = "it was run with --recording.share 0, or has not finished a step"
        raise ConfigError(
            f"{config.run} has no episodes",
            hint=hint if (config.run / "config.json").is_file() else "name a run folder",
        )
    by_name = {f"{step}-{kind}": path for step, kind, path in files}
    if config.episode:
        name, _, row = config.episode.rpartition("-")
        file = EpisodeFile(by_name[name]) if name in by_name else None
        # Of at most 9 digits, as `int` refuses very long numbers.
        if file is None or not row.isdecimal() or len(row) > 9 or int(row) >= len(file):
            raise ConfigError(
                f"{config.run} has no episode {config.episode!r}", hint="list them with: forge-rl show RUN --step N"
            )
        print_episode(console, config.episode, file[int(row)])
        return
    matches = list(_matching(config, files))
    if not matches:
        steps = f"steps {files[0][0]} to {files[-1][0]} are there"
        raise ConfigError(f"{config.run} has no such episodes", hint=f"choose other filters; {steps}")
    if config.whole:
        for file_name, entry in matches:
            print_episode(console, f"{file_name}-{entry['row']}", EpisodeFile(by_name[file_name])[entry["row"]])
        return
    console.print(_table(matches, console.width))
    console.print(
        f"forge-rl show RUN {matches[0][0]}-{matches[0][1]['row']} prints the first of them whole", style="dim"
    )


def _matching(config: Config, files: list[tuple[int, str, Path]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the file and row of the wanted episodes: of the newest steps, or those with the lowest rewards."""
    matches: list[tuple[str, dict[str, Any]]] = []
    for step, kind, path in reversed(files):
        if config.step not in (None, step) or config.kind not in ("", kind):
            continue
        for row in EpisodeFile(path).listing():
            is_wanted = config.source in ("", row["source"]) and config.outcome in ("", row["outcome"])
            is_wanted &= config.task in row["task"] or config.task in row["asked"]
            # Episodes without a reward cannot be ordered by it.
            if is_wanted and (not config.worst or row["reward"] is not None):
                matches.append((f"{step}-{kind}", row))
        if config.worst:
            # The worst of all steps are wanted, so every file is read; only the worst so far are kept.
            matches = sorted(matches, key=lambda match: match[1]["reward"])[: config.worst]
        elif len(matches) >= config.most:
            break
    return matches[: config.worst or config.most]


def _table(matches: list[tuple[str, dict[str, Any]]], width: int) -> Table:
    """List episodes; on a narrow screen, without the columns that matter least."""
    columns = ("episode", "source", "task", "outcome", "reward", "advantage", "turns", "tokens", "time", "answer")
    visible_columns = [name for name in columns if width >= _WIDE or name not in _SPARED]
    table = Table(box=None, header_style="bold")
    for column in visible_columns:
        justify: Literal["left", "right"] = "right" if column in _NUMBERS else "left"
        # names, which open an episode, and numbers stay whole
        table.add_column(column, justify=justify, no_wrap=column not in ("task", "answer"), overflow="ellipsis")
    for name, row in matches:
        is_failed = row["outcome"] not in ("completed", "truncated")
        cells: dict[str, str | Text] = {
            "episode": f"{name}-{row['row']}",
            "source": _cell(row["source"], 20),
            "task": _cell(row["asked"] or row["task"], 28),
            "outcome": Text(clipped(row["outcome"], lines=1, width=20), style="red" if is_failed else ""),
            "turns": str(row["turn_count"]),
            "tokens": str(row["tokens"]),
            "time": duration(row["seconds"]) if row["seconds"] else "",
            "answer": _cell(row["problem"] or row["answer"] or row["said"], 40),
        }
        for key in ("reward", "advantage"):
            cells[key] = Text("" if row[key] is None else number(row[key]), _signed(row[key]))
        table.add_row(*(cells[column] for column in visible_columns))
    return table


def print_episode(console: Console, name: str, record: RecordedEpisode) -> None:
    """Print an episode with everything that is known of it; its texts are escaped."""
    episode = record.episode
    title = f"{name}  {episode.task.source} {episode.task.id}"
    console.rule(Text(clipped(title, lines=1, width=console.width - 10), "bold"), align="left")
    position = f"{record.kind}{f' on {record.set}' if record.set else ''} in step {record.step}, group {record.group}"
    answer = {"": "", "given": "a given answer"}.get(record.given_answer, f"the {record.given_answer} answer")
    facts = {"": f"{position}; {answer or f'{episode.outcome} after {duration(episode.seconds)}'}"}
    if episode.score is not None:
        parts = "".join(f", {key} {number(value)}" for key, value in episode.score.parts.items())
        facts["reward"] = number(episode.reward) + parts
    if (advantage := _range(record.advantages, record.trained)) is not None:
        facts["advantage"] = advantage
    # Stands in for a missing score: its answer and feedback are empty, and thus not shown.
    score = episode.score or Score(total=0.0)
    facts |= {"problem": episode.problem, "answer": score.answer, "feedback": score.feedback}
    facts |= {
        f"truth {key}": value if isinstance(value, str) else json.dumps(value)
        for key, value in episode.task.truth.items()
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", max_width=24)
    grid.add_column(overflow="fold")
    for key, value in facts.items():
        if value:
            grid.add_row(_cell(key, 24), Text(visible(value), "red" if key == "problem" else ""))
    console.print(grid)
    # Otherwise the first turn shows the messages that it answered.
    if not (episode.turns and episode.turns[0].messages):
        for message in episode.task.messages:
            _print_message(console, message)
    segments = {turn: segment for segment, run in enumerate(episode.runs) for turn in run}
    first = 0
    for place, turn in enumerate(episode.turns):
        # Columns of scores run over all turns of the episode; this is the turn's part of them.
        tokens = slice(first, first := first + len(turn.token_ids))
        segment_text = f", segment {segments[place] + 1} of {len(episode.runs)}" if len(episode.runs) > 1 else ""
        origin = f", {clipped(turn.agent, lines=1, width=40)}" if turn.agent else ""
        origin += f", branch {'.'.join(map(str, turn.branch))}" if turn.branch else ""
        console.print(Text(f"\nturn {place + 1} of {len(episode.turns)}{segment_text}{origin}", "bold"))
        for message in turn.messages:
            _print_message(console, message)
        _print_message(console, {"role": "assistant", "content": turn.text})
        for call in turn.calls:
            seconds_text = "" if call.seconds is None else f"  {duration(call.seconds)}"
            console.print(
                Padding(
                    Text(visible(f"calls {call.name} {call.arguments}{seconds_text}"), "magenta"),
                    (0, 0, 0, 2),
                    expand=False,
                )
            )
            if call.error:
                console.print(Padding(Text(visible(call.error), "red"), (0, 0, 0, 4), expand=False))
        console.print(Padding(Text(_numbers(record, turn, tokens, place), "dim"), (0, 0, 0, 2), expand=False))
    # An agent may return a text without having called the policy.
    if episode.output is not None and (not episode.turns or episode.output != episode.turns[-1].text):
        _print_message(console, {"role": "result", "content": episode.output})
    console.print()


def _print_message(console: Console, message: Message) -> None:
    role, content = str(message.get("role", "")), message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
    console.print(Text(clipped(role, lines=1, width=40), f"bold {_STYLES.get(role, '')}"))
    console.print(Padding(Text(visible(text), _STYLES.get(role, "")), (0, 0, 0, 2), expand=False))


def _numbers(record: RecordedEpisode, turn: Turn, tokens: slice, place: int) -> str:
    """Describe a turn's tokens."""
    facts = [f"{len(turn.prompt_ids)} + {len(turn.token_ids)} tokens{', truncated' * turn.truncated}"]
    # Turns that no model sampled have version -1.
    if len(turn.versions) and turn.versions.max() >= 0:
        low, high = int(turn.versions.min()), int(turn.versions.max())
        facts.append(f"version {low}" if low == high else f"versions {low} to {high}")
    logprobs, gaps = record.scores_of(turn, tokens)
    if logprobs is not None and np.isfinite(logprobs).any():
        facts.append(f"logprob {number(float(np.nanmean(logprobs)))} on average")
    if gaps is not None and np.isfinite(gaps := np.abs(gaps)).any():
        facts.append(f"gap {number(float(np.nanmean(gaps)))}, at most {number(float(np.nanmax(gaps)))}")
    entropies = None if record.entropies is None else record.entropies[tokens]
    if entropies is not None and np.isfinite(entropies).any():
        facts.append(f"entropy {number(float(np.nanmean(entropies)))} on average")
    score = record.episode.score
    if score is not None and place < len(score.turns):
        facts.append(f"value {number(score.turns[place])}")
    if not record.given_answer:
        response = f", {duration(turn.response_s)} for the response" * (turn.response_s >= 0.005)
        facts.append(f"{duration(turn.seconds)} to answer{response}")
    return "; ".join(facts)


def _range(values: npt.NDArray[np.float32] | None, mask: npt.NDArray[np.bool_] | None) -> str | None:
    if values is None or not len(values):
        return None
    if mask is None or not mask.any():
        return f"{number(float(values.mean()))}; the loss saw no token"
    low, high = float(values[mask].min()), float(values[mask].max())
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def _signed(value: float | None) -> str:
    return "" if not value else "green" if value > 0 else "red"


def _cell(text: str, width: int) -> Text:
    return Text(clipped(text, lines=1, width=width), no_wrap=True)


if __name__ == "__main__":
    launch(Config, main, shows_only=True)
