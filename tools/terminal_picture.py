"""Run a command in its own terminal, and draw its output as an SVG for the documentation.

python -m tools.terminal_picture data "python -m apps.data data/train.jsonl:question=problem,answer=solution"
python -m tools.terminal_picture world "python -m apps.data ... --play hand" --keys "5|3"
"""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent.parent / "docs" / "pictures" / "tasks"
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""The picture without fonts from another host."""
_ERASED = re.compile(r"[^\n]*\n(?:\x1b\[\?25h)?\r?\x1b\[1A\x1b\[2K")
"""A line that was erased later, such as one that showed progress."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Draw a command's output."""

    name: tyro.conf.Positional[str]
    """Name of the picture."""
    command: tyro.conf.Positional[str]
    """Command line, which is drawn above its output."""
    keys: str = ""
    """Lines to type whenever the command prompts with "> ", separated by |."""
    columns: int = 100
    """Width of the terminal."""
    most: int = 40
    """Maximum lines of output; the middle of a longer one is left out."""


def printed(command: str, keys: list[str], columns: int, cwd: Path | None = None) -> str:
    """Run a command in a pseudo-terminal, type a line at each prompt, and return what the terminal got.

    Raises:
        CalledProcessError: the command failed.
    """
    controller, end = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "50", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        ["bash", "-c", command], stdin=end, stdout=end, stderr=end, env=environment, cwd=cwd, start_new_session=True
    )
    os.close(end)
    output, rest = b"", list(keys)
    while True:
        if select.select([controller], [], [], 0.2)[0]:
            try:
                piece = os.read(controller, 1 << 16)
            except OSError:  # the last process that had the terminal has ended
                break
            output += piece
        elif process.poll() is not None:  # what it started may still have the terminal
            break
        elif rest and output.endswith(b"> "):  # and silent since
            os.write(controller, f"{rest.pop(0)}\n".encode())
    status = process.wait()
    os.close(controller)
    text = output.decode("utf-8", "replace").replace("\r\n", "\n")
    while (next_text := _ERASED.sub("", text)) != text:
        text = next_text
    if status:
        raise subprocess.CalledProcessError(status, command, text)
    return text


def picture(command: str, text: str, *, columns: int, max_lines: int) -> str:
    """Draw a command and its output."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) > max_lines:
        lines = [*lines[: max_lines // 2], "...", *lines[-max_lines // 2 :]]
    console = Console(
        file=io.StringIO(), width=columns, record=True, force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    for line in lines:
        console.print(Text.from_ansi(line))
    return console.export_svg(title="", code_format=_FORMAT, unique_id="forge-rl")


def main(config: Config) -> None:
    """Run the command and write its picture."""
    text = printed(config.command, [key for key in config.keys.split("|") if key], config.columns)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{config.name}.svg"
    path.write_text(picture(config.command, text, columns=config.columns, max_lines=config.most))
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(tyro.cli(Config))
