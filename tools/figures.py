"""Write benchmark results into the pages of the README and docs.

    python -m benchmarks.overhead --json docs/figures/overhead.json
    python -m tools.figures

A page has a table between the lines `<!-- measured: NAME -->` and `<!-- end -->`, written from docs/figures/NAME.json.
`<!-- measured: NAME by CASE CASE -->` makes a column of each case: RESULT_CASE is then a cell in the row RESULT.
`<!-- rows: NAME by FIELD FIELD -->` begins a table of these fields of the report's rows. Text between
`<!-- value: NAME.RESULT -->` and `<!-- end -->` is one result. With --check nothing is written, and the exit status is
1 if a page differs from its files. With --stale nothing is written either, and it is 1 if the measured code has
changed since a figure's commit. With --measure the stale figures, or those named, are measured first, one after
another; the exit status is 1 if a benchmark failed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from tools.measure_figures import measure
from tools.stale_figures import stale

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "figures"
_REGION = re.compile(r"(<!-- measured: (\w+)(?: by ([\w ]+))? -->\n)(?:.*?)(?=<!-- end -->)", re.DOTALL)
_ROWS = re.compile(r"(<!-- rows: (\w+) by ([\w ]+) -->\n)(?:.*?)(?=<!-- end -->)", re.DOTALL)
_VALUE = re.compile(r"(<!-- value: (\w+)\.(\w+) -->)(?:.*?)(?=<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Write benchmark results into the pages of the README and docs."""

    check: bool = False
    """Only list the pages that differ from their files."""
    stale: bool = False
    """Only list the figures to measure again: the code that they depend on has changed since their commit."""
    measure: tuple[str, ...] | None = None
    """Measure these figures again by their own commands, then write the pages; without names, all that are stale.

    Run it on an idle machine, from a checkout without uncommitted changes."""


def table(report: dict[str, Any], cases: Sequence[str] = ()) -> str:
    """Return a report's results as Markdown, below its command, commit and machine.

    Args:
        report: the content of a benchmark's JSON file.
        cases: columns of a table for the results whose names contain them; other results follow in their own table.
    """
    machine, versions = report["machine"], report["versions"]
    packages = [f"{name} {version}" for name, version in versions.items() if isinstance(version, str)]
    cores = f"{machine['cores']} core{'s' * (machine['cores'] > 1)}"
    memory = f", {machine['memory_gib']} GiB" if "memory_gib" in machine else ""
    memory += ", trainers with tcmalloc" * (machine.get("trainer_heap") == "tcmalloc")
    lines = [
        "## Measured",
        "",
        f"    {report['command']}",
        "",
        f"{report['date']}, commit `{report['commit']}`, {cores} of {machine['cpu']}{memory}.",
    ]
    if "note" in report:
        lines += ["", report["note"]]
    results = dict(report["results"])
    grid: dict[str, dict[str, float]] = {}
    for name in report["results"]:
        if match := re.fullmatch(rf"(\w+?)_({'|'.join(cases)})((?:_\w+)?)", name) if cases else None:
            grid.setdefault(match[1] + match[3], {})[match[2]] = results.pop(name)
    if grid:
        lines += ["", f"| result | {' | '.join(cases)} |", "|---" * (len(cases) + 1) + "|"]
        for name, row in grid.items():
            lines.append(f"| {name} | {' | '.join(shown(row[case]) if case in row else '' for case in cases)} |")
    spreads = report["spreads"]
    if results:
        lines += ["", "| result | median | lowest to highest | repeats |", "|---|---|---|---|"]
    for name, value in results.items():
        low, high, repeats = spreads.get(name, ("", "", ""))
        between = f"{shown(low)} to {shown(high)}" if repeats else ""
        lines.append(f"| {name} | {shown(value)} | {between} | {repeats} |")
    return "\n".join([*lines, "", f"<small>{', '.join(packages)}</small>", ""])


def parts(report: dict[str, Any]) -> str:
    """Return what benchmarks.gpu measured on a machine as Markdown, part by part."""
    gpus = ", ".join(f"{gpu['name']} (driver {gpu['driver_version']})" for gpu in report["gpus"])
    host = f"{report['cores']} cores, {report['memory_gib']} GiB"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = ["## Measured", "", f"    {report['command']}", ""]
    lines += [
        f"{report['date'][:10]}, commit `{report['commit']}`, {gpus}, {host}.",
        *(["", report["note"]] * ("note" in report)),
    ]
    lines += ["", "| part | result | value |", "|---|---|---|"]
    for part in report["parts"]:
        figures = part["figures"] or {part["status"]: part["seconds"]}
        lines += [f"| {part['part']} | {name} | {shown(value)} |" for name, value in figures.items()]
    return "\n".join([*lines, "", f"<small>Python {report['python']}, {versions}</small>", ""])


def rows(report: dict[str, Any], fields: Sequence[str]) -> str:
    """Return fields of a report's rows as a Markdown table; a cell is empty if a row lacks the field."""
    lines = [f"| {' | '.join(field.replace('_', ' ') for field in fields)} |", "|---" * len(fields) + "|"]
    for row in report["rows"]:
        cells = [row.get(field, "") for field in fields]
        texts = [f"{cell:.2g}" if isinstance(cell, float) else _text(cell) for cell in cells]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join([*lines, ""])


def _text(cell: object) -> str:
    """Return a cell as it is to be read: Markdown would end the cell at a bar, and take <...> for HTML."""
    return ("" if cell is None else str(cell)).replace("<", "&lt;").replace("|", "&#124;")


def shown(value: float | None) -> str:
    """Return a number with four significant digits, and commas between thousands; "-" for one that was not finite."""
    if value is None:
        return "-"
    text = f"{value:.4g}"
    return f"{float(text):,.0f}" if abs(value) >= 1000 else text


def filled(page: str, folder: Path = FOLDER) -> str:
    """Return a page's text with its tables and values filled in; a figure without a file shows as not measured yet."""

    def region(match: re.Match[str]) -> str:
        path = folder / f"{match[2]}.json"
        cases = (match[3] or "").split()
        if not path.exists():
            return match[1] + "Not measured yet.\n"
        report = json.loads(path.read_text())
        return match[1] + (parts(report) if "parts" in report else table(report, cases))

    def listed(match: re.Match[str]) -> str:
        path = folder / f"{match[2]}.json"
        return match[1] + (rows(json.loads(path.read_text()), match[3].split()) if path.exists() else "?\n")

    def value(match: re.Match[str]) -> str:
        path = folder / f"{match[2]}.json"
        return match[1] + (shown(json.loads(path.read_text())["results"][match[3]]) if path.exists() else "?")

    return _VALUE.sub(value, _ROWS.sub(listed, _REGION.sub(region, page)))


def pages() -> list[Path]:
    """Return the README and all pages of the docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def unmeasured() -> set[str]:
    """Return the figures that a page has a place for, and that have no file yet."""
    figures = {match[2] for path in pages() for match in _REGION.finditer(path.read_text())}
    return {name for name in figures if not (FOLDER / f"{name}.json").exists()}


def measure_again(names: Sequence[str]) -> list[str]:
    """Measure figures, or all stale ones if none is named; return those that failed.

    Raises:
        SystemExit: a name has no figure, or the checkout has uncommitted changes, so that no commit states the code.
    """
    if unknown := [name for name in names if not (FOLDER / f"{name}.json").exists()]:
        raise SystemExit(f"docs/figures has no {unknown[0]}.json, whose command would be run")
    if subprocess.check_output(["git", "-C", str(ROOT), "status", "--porcelain"]):
        raise SystemExit("the checkout has uncommitted changes: commit them first, as figures state their commit")
    return measure(FOLDER, names or [line.partition(":")[0] for line in stale(FOLDER)], ROOT)


def main(config: Config) -> int:
    """Write or check all pages, or list stale figures; return the exit status."""
    if config.stale:
        older = list(stale(FOLDER))
        print("\n".join(older) or "no figure is older than what it measures")
        return int(bool(older))
    failures = [] if config.measure is None else measure_again(config.measure)
    if failures:
        print(f"failed, and left as they were: {', '.join(failures)}")
    status = 0
    for path in pages():
        text = path.read_text()
        if (new := filled(text)) != text:
            print(f"{path.relative_to(ROOT)}: {'differs from its file' if config.check else 'written'}")
            status = 1
            if not config.check:
                path.write_text(new)
    return status if config.check else int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
