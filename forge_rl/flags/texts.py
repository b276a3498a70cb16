"""Helpers to parse flag values that name sources, rewards and environments with options."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def split_commas(text: str) -> list[str]:
    """Split at commas outside brackets and quotes, dropping empty parts."""
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
    """Return a hint for an unknown name: similar names, and all valid ones."""
    close = difflib.get_close_matches(wrong, names, n=2)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{meant}{what}: {', '.join(sorted(names)) or 'none'}"
