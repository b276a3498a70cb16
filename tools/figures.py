"""Write benchmark results into the pages of docs/figures.

    python -m benchmarks.overhead --json docs/figures/overhead.json
    python -m tools.figures

A page has a table between the lines `<!-- measured: NAME -->` and `<!-- end -->`, written from NAME.json next to it.
With --check nothing is written, and the exit status is 1 if a page differs from its JSON file.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
_REGION = re.compile(r"(?<=<!-- measured: )(\w+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Write benchmark results into the pages of docs/figures."""

    check: bool = False
    """Only list the pages that differ from their files."""


def table(report: dict[str, Any]) -> str:
    """Return a report's results as Markdown, below its command, commit and machine.

    Args:
        report: the content of a benchmark's JSON file.
    """
    machine, versions = report["machine"], report["versions"]
    packages = [f"{name} {version}" for name, version in versions.items() if isinstance(version, str)]
    lines = [
        "## Measured",
        "",
        f"    {report['command']}",
        "",
        f"{report['date']}, commit `{report['commit']}`, {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gib']} GiB.",
        "",
        "| result | median | lowest to highest | repeats |",
        "|---|---|---|---|",
    ]
    spreads = report["spreads"]
    for name, value in report["results"].items():
        low, high, repeats = spreads.get(name, ("", "", ""))
        between = f"{low:.4g} to {high:.4g}" if repeats else ""
        lines.append(f"| {name} | {value:.4g} | {between} | {repeats} |")
    return "\n".join([*lines, "", f"<small>{', '.join(packages)}</small>", ""])


def filled(page: str, folder: Path) -> str:
    """Return a page's text with its tables filled in; a table without a file says that it is not measured yet."""

    def region(found: re.Match[str]) -> str:
        path = folder / f"{found[1]}.json"
        text = table(json.loads(path.read_text())) if path.exists() else "Not measured yet.\n"
        return f"{found[1]}{found[2]}{text}"

    return _REGION.sub(region, page)


def main(config: Config, folder: Path = FOLDER) -> int:
    """Write or check all pages; return the exit status."""
    status = 0
    for path in sorted(folder.glob("*.md")):
        text = path.read_text()
        if (new := filled(text, folder)) != text:
            print(f"{path.name}: {'differs from its file' if config.check else 'written'}")
            status = 1
            if not config.check:
                path.write_text(new)
    return status if config.check else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
