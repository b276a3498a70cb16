"""Changes of a workspace as text, in the form of `git diff`. Bounded in time and size for any content."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator, Sequence

from forge_rl.sandbox.workspaces.changes import Change, Changes, Entry

_CONTEXT = 3
_MOST_EDITS = 500
"""Lines that may differ in one file; beyond that, all from the first to the last of them are shown as replaced."""
_MOST_STEPS = 2_000_000
_ESCAPES = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 11: "\\v", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}


def diff_text(changes: Changes, *, most_chars: int = 1 << 20) -> str:
    """Return changes as a unified diff with git's headers, which `git apply` and `patch -p1` take.

    Binary files and special files are only named. What is missing is listed in lines that begin with `#`.

    Args:
        most_chars: where to stop; changes are shown completely or not at all.
    """
    # One budget of comparisons for all files, counted down in place.
    parts, size, steps = list[str](), 0, [_MOST_STEPS]
    file_changes = [
        change for change in changes.changes if not all(_is_folder(entry) for entry in (change.before, change.after))
    ]
    for index, change in enumerate(file_changes):
        text = _change(change, steps)
        if size + len(text) > most_chars:
            parts.append(f"# {len(file_changes) - index} more changed files are not shown\n")
            break
        parts.append(text)
        size += len(text)
    return "".join([*parts, *(f"# left out: {_quoted(text)}\n" for text in changes.left_out[:20])])


def _is_folder(entry: Entry | None) -> bool:
    return entry is None or stat.S_ISDIR(entry.mode)


def _change(change: Change, steps: list[int]) -> str:
    """Return one change; a file that became something else is shown as deleted and added."""
    before, after = (None if _is_folder(entry) else entry for entry in (change.before, change.after))
    if before and after and stat.S_IFMT(before.mode) != stat.S_IFMT(after.mode):
        return _file(change.path, before, None, steps) + _file(change.path, None, after, steps)
    return _file(change.path, before, after, steps)


def _file(path: str, before: Entry | None, after: Entry | None, steps: list[int]) -> str:
    if any(entry and stat.S_IFMT(entry.mode) not in (stat.S_IFREG, stat.S_IFLNK) for entry in (before, after)):
        return f"# special file: {_quoted(path)}\n"
    old, new = _quoted(f"a/{path}"), _quoted(f"b/{path}")
    lines = [f"diff --git {old} {new}"]
    if before is None and after is not None:
        lines.append(f"new file mode {after.mode:06o}")
    elif after is None and before is not None:
        lines.append(f"deleted file mode {before.mode:06o}")
    elif before and after and before.mode != after.mode:
        lines += [f"old mode {before.mode:06o}", f"new mode {after.mode:06o}"]
    elif before and after and stat.S_ISLNK(after.mode):  # otherwise it would be taken for a file
        lines.append(f"index {_git_hash(before)}..{_git_hash(after)} {after.mode:06o}")
    texts = [_lines(entry) for entry in (before, after)]
    old, new = "/dev/null" if before is None else old, "/dev/null" if after is None else new
    if texts[0] is None or texts[1] is None:
        lines.append(f"Binary files {old} and {new} differ")
    elif hunks := list(_hunks(texts[0], texts[1], steps)):
        lines += [f"--- {old}", f"+++ {new}", *hunks]
    return "\n".join(lines) + "\n"


def _git_hash(entry: Entry) -> str:
    data = entry.data or b""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _lines(entry: Entry | None) -> list[str] | None:
    """Return the lines of a text with their ends; None if it is binary."""
    if entry is None:
        return []
    if entry.data is None or b"\0" in entry.data:
        return None
    try:
        text = entry.data.decode()
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _hunks(old: list[str], new: list[str], steps: list[int]) -> Iterator[str]:
    """Yield the hunks of a unified diff, each without its last line's end."""
    group = list[tuple[int, int, int, int]]()
    for edit in _edits(old, new, steps):
        # Edits whose lines of context would touch belong to one hunk.
        if group and edit[0] - group[-1][1] > 2 * _CONTEXT:
            yield _hunk(old, new, group)
            group = []
        group.append(edit)
    if group:
        yield _hunk(old, new, group)


def _hunk(old: list[str], new: list[str], edits: list[tuple[int, int, int, int]]) -> str:
    above = min(_CONTEXT, edits[0][0])
    below = min(_CONTEXT, len(old) - edits[-1][1])
    start, end = edits[0][0] - above, edits[-1][1] + below
    new_start, new_end = edits[0][2] - above, edits[-1][3] + below
    lines, position = list[str](), start
    for low, high, new_low, new_high in edits:
        lines += [f" {line}" for line in old[position:low]]
        lines += [f"-{line}" for line in old[low:high]] + [f"+{line}" for line in new[new_low:new_high]]
        position = high
    lines += [f" {line}" for line in old[position:end]]
    head = f"@@ -{_range(start, end)} +{_range(new_start, new_end)} @@\n"
    body = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return (head + body).removesuffix("\n")


def _range(start: int, end: int) -> str:
    return f"{start + (end > start)},{end - start}"


def _edits(old: list[str], new: list[str], steps: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, end) of replaced lines and (start, end) of their replacement, in order; difflib can be cubic."""
    # Equal lines at both ends take no comparison, and most edits are small.
    top, max_common = 0, min(len(old), len(new))
    while top < max_common and old[top] == new[top]:
        top += 1
    tail = 0
    while tail < max_common - top and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    a, b = old[top : len(old) - tail], new[top : len(new) - tail]
    x = y = 0
    for same_x, same_y in [*_common(a, b, steps), (len(a), len(b))]:
        if same_x > x or same_y > y:
            yield top + x, top + same_x, top + y, top + same_y
        x, y = same_x + 1, same_y + 1


def _common(a: list[str], b: list[str], steps: list[int]) -> Sequence[tuple[int, int]]:
    """Return indices of a longest common subsequence of lines; none if that takes too long (Myers, 1986, figure 2)."""
    # `furthest` has, for each diagonal k = x - y, the furthest x that so many edits reach.
    furthest, trace = {1: 0}, list[dict[int, int]]()
    for edits in range(min(_MOST_EDITS, len(a) + len(b)) + 1):
        trace.append(dict(furthest) if edits < 2 else {k: furthest[k] for k in range(1 - edits, edits, 2)})
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
            x = furthest[k + 1] if down else furthest[k - 1] + 1
            start = x
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
            steps[0] -= 1 + x - start
            furthest[k] = x
            if x >= len(a) and x - k >= len(b):
                return _walked_back(trace, len(a), len(b))
        if steps[0] < 0:
            return ()
    return ()


def _walked_back(trace: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    matches = list[tuple[int, int]]()
    # From the end to the start: each round undoes the equal lines that followed an edit, and then the edit.
    for edits in range(len(trace) - 1, -1, -1):
        furthest, k = trace[edits], x - y
        down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
        before_x = furthest[k + 1] if down else furthest[k - 1]
        before_y = before_x - (k + 1 if down else k - 1)
        while x > max(before_x, 0) and y > max(before_y, 0) and (x, y) != (before_x + (not down), before_y + down):
            x, y = x - 1, y - 1
            matches.append((x, y))
        x, y = before_x, before_y
    return matches[::-1]


def _quoted(path: str) -> str:
    """Return a path as git quotes it: bytes outside printable ASCII as escapes, in quotes if there are any."""
    raw = path.encode("utf-8", "surrogateescape")
    text = "".join(_ESCAPES.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in raw)
    return f'"{text}"' if text != path else path
