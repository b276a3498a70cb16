"""Tables of an evaluation for the terminal: scores with their errors, and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from forge_rl.harness.benchmarks import BENCHMARKS
from forge_rl.system.terminal import visible


def print_benchmarks(console: Console) -> None:
    """Print the benchmarks, their data sets and their needs."""
    table = plain_table(
        "benchmarks", "--benchmark NAME, NAME@REVISION of the data set, or NAME=FILE with the same columns"
    )
    for column in ("name", "data set", "columns", "reward", "answer tokens", "needs"):
        table.add_column(column, overflow="fold")
    for benchmark in BENCHMARKS.values():
        place = (
            " ".join(filter(None, (benchmark.hub, benchmark.config, benchmark.split)))
            if benchmark.hub
            else f"files of {benchmark.source}"
        )
        table.add_row(
            *(
                benchmark.name,
                place,
                ", ".join(benchmark.columns),
                benchmark.reward,
                f"{benchmark.max_tokens:,}",
                benchmark.needs or "nothing",
            )
        )
    console.print(table)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return the last path components of each name, as few as make them distinct."""
    for parts in range(1, max(len(Path(name).parts) for name in names)):
        short = {name: "/".join(Path(name).parts[-parts:]) for name in names}
        if len({*short.values()}) == len(names):
            return short
    return {name: name for name in names}


def print_scores(
    console: Console,
    scores: Mapping[str, Mapping[str, Mapping[str, float]]],
    caption: str = "",
) -> None:
    """Print the table of scores, with their standard errors."""
    table = plain_table("scores", caption)
    for column in ("set", "model"):
        table.add_column(column, overflow="fold")
    # Dicts as ordered sets: sets and metrics stand in the order in which they first occur. A model may lack some, such
    # as the majority of answers where none was extracted.
    sets = dict.fromkeys(name for model_scores in scores.values() for name in model_scores)
    values = [set_scores for model_scores in scores.values() for set_scores in model_scores.values()]
    for metric in dict.fromkeys(key for set_scores in values for key in set_scores if _is_score(key)):
        table.add_column(metric, justify="right", no_wrap=True)
    for name in sets:
        for model, model_scores in scores.items():
            cells = [_with_error(model_scores.get(name, {}), column.header) for column in table.columns[2:]]
            table.add_row(visible(name), visible(model), *cells)
    console.print(table)


def plain_table(title: str, caption: str) -> Table:
    """Return an empty table without lines, with its title and caption on the left."""
    return Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=None, padding=(0, 1))


def _is_score(key: str) -> bool:
    return "/" not in key and not key.endswith("_stderr")


def _with_error(values: Mapping[str, float], key: object) -> str:
    value, error = values.get(str(key)), values.get(f"{key}_stderr")
    return "" if value is None else f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")
