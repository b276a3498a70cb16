"""Small helpers for the texts by which flags name sources, rewards and environments with their options."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def split_commas(text: str) -> list[str]:
    """Split at the commas that are outside brackets and quotes; empty parts are left out."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        if char == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip()]


def suggest(wrong: str, names: Collection[str], what: str) -> str:
    """Return a hint for a name that does not exist: the ones like it, and all that do."""
    close = difflib.get_close_matches(wrong, names, n=2)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{meant}{what}: {', '.join(sorted(names)) or 'none'}"
