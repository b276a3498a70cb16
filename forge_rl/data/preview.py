"""Shows tasks and given examples to a person: the kind of their rows, prompts, and trained tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forge_rl.data.data_config import DataConfig
from forge_rl.data.scan import Lengths
from forge_rl.data.sources.rows import Kind
from forge_rl.errors import ForgeError, TaskError
from forge_rl.system.terminal import visible
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Task

_PAIR = ("chosen", "rejected")
_BINS = 10


@dataclass(frozen=True)
class MeasuredTasks:
    """Tasks that were measured, and those that were refused."""

    tasks: list[Task] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each task's prompt, or of the row that a conversation or a pair needs."""
    refused: list[str] = field(default_factory=list)
    """Why tasks cannot be used."""
    note: str = ""


def guess_kind(data: DataConfig, tasks: Sequence[str], *, seed: int, cache: Path) -> Kind:
    """Return what the rows of a mixture are, by one row of each source: prompts, unless they can only be read as
    conversations or pairs, or have their columns; arguments as for `DataConfig.build`.

    Raises:
        ForgeError: the sources cannot be built.
    """
    columns: set[str] = set()
    try:
        for name in (mixture := data.build(tasks, seed=seed, cache=cache)):
            columns |= mixture.draw_from(name).truth.keys()
    except TaskError:
        # Rows that are not prompts fail to be read as such; the other kinds are tried in turn.
        readable: tuple[Kind, ...] = ("conversation", "pair")
        return next((kind for kind in readable if _reads(data, tasks, kind, seed=seed, cache=cache)), "prompt")
    return "pair" if {"chosen", "rejected"} <= columns else "conversation" if "completion" in columns else "prompt"


def _reads(data: DataConfig, tasks: Sequence[str], kind: Kind, *, seed: int, cache: Path) -> bool:
    try:
        for name in (mixture := data.build(tasks, seed=seed, kind=kind, cache=cache)):
            mixture.draw_from(name)
    except ForgeError:
        return False
    return True


def trained_text(episode: Episode, tokenizer: Tokenizer) -> Text:
    """Return the text of an episode's tokens, in parts that are trained and parts that are not."""
    text = Text()
    for segment in episode.segments:
        pairs = zip(segment.trained.tolist(), segment.token_ids.tolist(), strict=True)
        for is_trained, part in itertools.groupby(pairs, itemgetter(0)):
            token_ids = [token for _, token in part]
            count = f"{len(token_ids):,} token" + "s" * (len(token_ids) != 1)
            text.append("\n" * bool(text) + f"{'trained' if is_trained else 'not trained'}, {count}\n", style="dim")
            part_text = visible(tokenizer.decode(token_ids, skip_special=False))
            text.append(part_text.rstrip("\n") + "\n", style="bold green" if is_trained else "")
    return text


def measure(lengths: Lengths, tasks: Sequence[Task]) -> MeasuredTasks:
    """Measure tasks.

    Raises:
        TaskError: none can be used; it is the first one's error.
    """
    measurement = MeasuredTasks()
    lengths.take_note()  # the scan has told of its own
    for task in tasks:
        try:
            length = lengths.length(task)
        except TaskError as error:
            if task is tasks[-1] and not measurement.tasks:
                raise
            measurement.refused.append(f"{task.id}: {error.message}")
            continue
        measurement.tasks.append(task)
        measurement.lengths.append(length)
    return replace(measurement, note=lengths.take_note())


def rendered(tokenizer: Tokenizer, task: Task) -> Text:
    """Return a task's prompt as the model sees it, with control tokens highlighted and terminal escapes neutralized."""
    special = set(tokenizer.hf.added_tokens_decoder)
    text = Text()
    prompt = tokenizer.render(task.messages, tools=task.tools)
    for is_special, ids in itertools.groupby(prompt, special.__contains__):
        segment = tokenizer.decode(tuple(ids), skip_special=False)
        text.append(visible(segment), style="bold magenta" if is_special else "")
    return text


def histogram(lengths: Sequence[int], width: int = 40) -> list[str]:
    """Return the lines of a histogram, each a range, a bar and a count."""
    low, high = min(lengths), max(lengths)
    # Ceiling division: at most _BINS bins of whole lengths.
    step = max(1, -(-(high - low + 1) // _BINS))
    counts = [
        sum(bin_start <= length < bin_start + step for length in lengths) for bin_start in range(low, high + 1, step)
    ]
    digits = len(str(high))
    return [
        f"{low + number * step:>{digits}} to {min(high, low + number * step + step - 1):>{digits}}  "
        f"{'█' * -(-count * width // max(counts)):<{width}}  {count:,}"
        for number, count in enumerate(counts)
    ]


def example_panel(tokenizer: Tokenizer, task: Task, episodes: Sequence[Episode], title: str) -> Panel:
    """Return the trained and the untrained text of a conversation or a pair, and its other columns."""
    lines: list[Text | Table] = []
    for name, episode in zip(_PAIR if len(episodes) > 1 else ("",), episodes, strict=True):
        lines += [Text(name, style="bold")] if name else []
        lines.append(trained_text(episode, tokenizer))
    other_columns = {key: value for key, value in task.truth.items() if key not in (*_PAIR, "completion")}
    lines += (
        [Text("other columns, not shown to the model", style="dim"), _table(other_columns)] if other_columns else []
    )
    return Panel(Group(*lines), title=Text(visible(title)), title_align="left", border_style="dim")


def task_panel(tokenizer: Tokenizer, task: Task, title: str) -> Panel:
    """Return a task's prompt as the model sees it, and its truth."""
    truth = _table(task.truth)
    body = Group(rendered(tokenizer, task), Text("\ntruth, never shown to the model", style="dim"), truth)
    return Panel(body, title=Text(visible(title)), title_align="left", border_style="dim")


def _table(truth: Mapping[str, object]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in truth.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        table.add_row(Text(visible(str(key))), Text(visible(text if len(text) <= 300 else f"{text[:300]} ...")))
    return table
