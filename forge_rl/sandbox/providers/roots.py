"""Finds what commands have changed in a root on another machine, by listings before and after, and archives of files.

The first listing is made before anything untrusted runs. The second, and the archive, are made by programs that the
commands may have replaced: both may say anything about what the commands left, as these could have left anything. They
are bounded, name no path outside of the root, and none through a link.
"""

from __future__ import annotations

import functools
import io
import posixpath
import re
import stat
import tarfile
import time
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forge_rl.sandbox.limits import SandboxError
from forge_rl.sandbox.workspaces.changes import Change, Changes, Entry
from forge_rl.sandbox.workspaces.image_programs import CONFIG, LOADED_VARIABLES, RUNNERS, RootLinks

_PATH = "PATH=/usr/bin:/bin:$PATH;"
"""Commands may have put other programs before the image's."""
_FIND = "find / -xdev '(' -path /proc -o -path /sys -o -path /dev -o -path '/tmp/.forge-rl*' ')' -prune -o"
LIST = (
    f"{_PATH} export LC_ALL=C; {{ {_FIND} -print0 | xargs -0 stat -c '%f %s %Y %Z %n';"
    f""" {_FIND} -type l -print0 | xargs -0 stat -c '%N'; }} > "$0" 2> /dev/null; test -s "$0\""""
)
"""Shell script that lists a root into the file $0: first all paths with their facts, then links with their targets."""
VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", *LOADED_VARIABLES)
"""Variables that DESCRIBE prints."""
DESCRIBE = (
    'printf "%s\\n%s\\n" "$(command -v timeout)" "$(command -v env)";'
    f""" printf "%s\\n" {" ".join(f'"${name}"' for name in VARIABLES)}; IFS=:; set -f; for f in $PATH; do"""
    f' for g in "$f/{CONFIG}" "${{f%/*}}/{CONFIG}"; do if [ -f "$g" ]; then while read -r l; do'
    ' case "$l" in home*) printf "%s\\n%s\\n" "$g" "$l";; esac; done < "$g"; fi; done;'
    f' for n in {" ".join(RUNNERS)}; do g="$f/$n"; if [ -f "$g" ] && read -r l < "$g"; then'
    ' case "$l" in "#!"*) printf "%s\\n%s\\n" "$g" "$l";; esac; fi; done; done 2> /dev/null; true'
)
"""Shell script that prints where `timeout` and `env` are, VARIABLES, and pairs of a file among the programs with the
line of it that names another program's folder."""
ARCHIVE = (
    _PATH + ' case "$(tar --version 2> /dev/null)" in *GNU*) set -- --no-unquote;; esac;'
    ' xargs -0 tar -c "$@" -f - -C / < "$0.list" > "$0" 2> /dev/null; test -s "$0"'
)
"""Shell script that packs the files listed in $0.list into archives, one behind another, in $0: not every tar reads a
list."""
APPLY = (
    _PATH + ' if [ -s "$0.files" ]; then xargs -0 rm -f < "$0.files" || exit 1; fi;'
    ' if [ -s "$0.folders" ]; then xargs -0 rmdir < "$0.folders" || exit 1; fi; tar -x -o -f "$0" -C /'
)
"""Shell script that deletes the files and folders listed in $0.files and $0.folders, and unpacks $0."""
_LINE = re.compile(rb"([0-9a-f]{1,8}) (\d{1,19}) (-?\d{1,19}) (-?\d{1,19}) /([^\n]+)")
_TARGET = re.compile(rb"^[`']/([^'\n]+)' -> [`']([^'\n]+)'$", re.MULTILINE)
"""A link and its target, as stat quotes them; names with a quote are left out."""
_MOST_FILES = 1 << 20
"""Maximum new files in a later listing: each takes some 400 bytes of this process while roots are compared."""
_MOUNTED = ("etc/hosts", "etc/hostname", "etc/resolv.conf")
"""Files that container engines mount."""


class UnreadableRootError(SandboxError):
    """A root that can no longer be read, as commands have removed the programs that reading needs."""


class FileFacts(NamedTuple):
    """Facts about a file in a listing."""

    mode: int
    size: int
    modified_s: int
    changed_s: int


@dataclass(frozen=True, kw_only=True)
class RootListing:
    """A root at one time: the names of `RootNames`, and later changes."""

    packed: bytes
    """Lines of mode in hexadecimal, bytes, both times, and path; compressed, as an image can have 200,000."""
    variables: Mapping[str, str]
    lines: Sequence[tuple[str, str]]
    """Absolute paths of files, each with a line of it, as DESCRIBE prints them."""

    @classmethod
    def of(cls, listed: bytes, described: Sequence[str]) -> RootListing:
        """Read the output of LIST, and the lines of DESCRIBE after the first two."""
        count = len(VARIABLES)
        return cls(
            packed=zlib.compress(listed, 1),
            variables={name: value for name, value in zip(VARIABLES, described, strict=False) if value},
            lines=[*zip(described[count::2], described[count + 1 :: 2], strict=False)],
        )

    def names_in(self, folder: str) -> Collection[str]:
        """Return the names in a folder; see `RootNames`."""
        return self._names[folder]

    def links_in(self, folder: str) -> Mapping[str, str]:
        """Return the targets of the links in a folder by name."""
        return self._links[folder]

    def text_of(self, path: str) -> str:
        """Return the known lines of a file."""
        return self._texts.get(path, "")

    @functools.cached_property
    def _names(self) -> Mapping[str, Collection[str]]:
        names = defaultdict[str, list[str]](list)
        for path in _facts(zlib.decompress(self.packed)):
            folder, name = posixpath.split(path)
            names[folder].append(name)
        return names

    @functools.cached_property
    def _links(self) -> Mapping[str, Mapping[str, str]]:
        targets = defaultdict[str, dict[str, str]](dict)
        for match in _TARGET.finditer(zlib.decompress(self.packed)):
            folder, name = posixpath.split(match[1].decode("utf-8", "surrogateescape"))
            targets[folder][name] = match[2].decode("utf-8", "surrogateescape")
        return targets

    @functools.cached_property
    def _texts(self) -> Mapping[str, str]:
        links, texts = RootLinks(self), dict[str, str]()
        for path, line in self.lines:
            real_path = links.real(path)
            texts[real_path] = f"{texts.get(real_path, '')}{line}\n"
        return texts

    def changed_to(self, listed: bytes) -> list[tuple[str, FileFacts | None, FileFacts | None]]:
        """Compare with a later listing; return paths with their facts before and after, folders first.

        Paths below anything but a folder are left out.

        Raises:
            UnreadableRootError: it has more new files than any honest command makes.
        """
        # Lines are counted before they are parsed, as each takes some 400 bytes of this process.
        listed_before = zlib.decompress(self.packed)
        if listed.count(b"\n") > listed_before.count(b"\n") + _MOST_FILES:
            raise UnreadableRootError(f"the root has more than {_MOST_FILES} new files")
        before, after = _facts(listed_before), _facts(listed)
        changed = []
        for path in sorted(before.keys() | after.keys()):
            old, new = before.get(path), after.get(path)
            if old == new or path in _MOUNTED or (old and new and stat.S_ISDIR(old.mode) and stat.S_ISDIR(new.mode)):
                continue
            # Only below true folders: a path through a link would be written outside of the place that it names.
            if new is None or all(folder in after and stat.S_ISDIR(after[folder].mode) for folder in _above(path)):
                changed.append((path, old, new))
        return changed


def _facts(listed: bytes) -> dict[str, FileFacts]:
    facts = {}
    for line in listed.split(b"\n"):
        if (match := _LINE.fullmatch(line)) is None:
            continue  # the root, or a part of a name with a newline
        path = match[5].decode("utf-8", "surrogateescape")
        if all(part not in ("", ".", "..") for part in path.split("/")):
            facts[path] = FileFacts(int(match[1], 16), int(match[2]), int(match[3]), int(match[4]))
    return facts


def _above(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path


def to_fetch(
    changed: Sequence[tuple[str, FileFacts | None, FileFacts | None]], *, most_bytes: int, most_changes: int
) -> list[str]:
    """Return the paths whose content is needed: files and links, as many as fit."""
    paths, left_bytes = list[str](), most_bytes
    for path, _, facts in changed[:most_changes]:
        if facts is not None and (stat.S_ISLNK(facts.mode) or (stat.S_ISREG(facts.mode) and facts.size <= left_bytes)):
            left_bytes -= facts.size
            paths.append(path)
    return paths


def listed_paths(paths: Sequence[str]) -> bytes:
    """Return what ARCHIVE reads from $0.list."""
    return b"".join(b"./%s\0" % path.encode("utf-8", "surrogateescape") for path in paths)


def unpacked(archive: bytes, paths: Collection[str]) -> dict[str, bytes]:
    """Return the content of files, and the targets of links, that an archive has of these paths.

    Raises:
        UnreadableRootError: it is not an archive.
    """
    contents, known_paths = dict[str, bytes](), frozenset(paths)
    try:
        with tarfile.open(
            fileobj=io.BytesIO(archive), mode="r:", ignore_zeros=True, encoding="utf-8", errors="surrogateescape"
        ) as file:
            while (member := file.next()) is not None:
                # It keeps all members, and an archive can have many more than were asked for.
                file.members.clear()  # type: ignore[attr-defined]
                # Members are matched with the paths that were asked for; no name of the archive's is ever written to.
                path = posixpath.normpath(member.name)
                if path not in known_paths:
                    continue
                if member.issym():
                    contents[path] = member.linkname.encode("utf-8", "surrogateescape")
                # tar packs the second name of a file as a link to the first.
                elif member.islnk():
                    if (content := contents.get(posixpath.normpath(member.linkname))) is not None:
                        contents[path] = content
                elif member.isreg() and not member.issparse() and (opened := file.extractfile(member)) is not None:
                    contents[path] = opened.read()
    except (tarfile.TarError, ValueError, OverflowError, OSError, RecursionError, MemoryError) as error:
        raise UnreadableRootError(f"the changed files came in no archive: {error!r:.200}") from None
    return contents


def changes_of(
    changed: Sequence[tuple[str, FileFacts | None, FileFacts | None]], contents: Mapping[str, bytes], most_changes: int
) -> Changes:
    """Return changes with their content; earlier content is not known."""
    changes, left_out = list[Change](), list[str]()
    if len(changed) > most_changes:
        left_out.append(f"{changed[most_changes][0]} and what follows: more changes than are listed")
    for path, old, new in changed[:most_changes]:
        before, after = _entry(old, None), _entry(new, contents.get(path))
        if after is not None and after.data is None and not stat.S_ISDIR(after.mode):
            left_out.append(f"content of {path}: too large, or not readable")
        changes.append(Change(path=path, before=before, after=after))
    return Changes(changes=changes, left_out=left_out)


def _entry(facts: FileFacts | None, data: bytes | None) -> Entry | None:
    if facts is None:
        return None
    kind = stat.S_IFMT(facts.mode)
    if stat.S_ISREG(kind):
        return Entry(mode=0o100755 if facts.mode & stat.S_IXUSR else 0o100644, data=data)
    return Entry(mode=kind, data=data if stat.S_ISLNK(kind) else None)


def packed_changes(changes: Sequence[Change]) -> tuple[bytes, bytes, bytes]:
    """Return what APPLY reads: the archive, the files and the folders to delete before it is unpacked."""
    files, folders, archive, now_s = list[str](), list[str](), io.BytesIO(), int(time.time())
    with tarfile.open(
        fileobj=archive, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as file:
        for change in changes:
            before, after = change.before, change.after
            if after is not None and not stat.S_ISDIR(after.mode) and after.data is None:
                continue
            old, new = (0 if entry is None else stat.S_IFMT(entry.mode) for entry in (before, after))
            if old and (old != new or stat.S_ISLNK(old)):
                (folders if stat.S_ISDIR(old) else files).append(change.path)
            if after is None:
                continue
            member = tarfile.TarInfo(change.path)
            member.mtime = now_s  # as of a file just written: make compares times, and zip has none before 1980
            if stat.S_ISDIR(after.mode):
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                file.addfile(member)
            elif stat.S_ISLNK(after.mode):
                member.type, member.linkname = tarfile.SYMTYPE, (after.data or b"").decode("utf-8", "surrogateescape")
                file.addfile(member)
            else:
                member.mode, member.size = after.mode & 0o777, len(after.data or b"")
                file.addfile(member, io.BytesIO(after.data or b""))
    # Folders from the inside out, as rmdir takes empty ones only.
    return archive.getvalue(), _terminated(files), _terminated(reversed(folders))


def _terminated(paths: Collection[str] | Iterator[str]) -> bytes:
    return b"".join(b"/%s\0" % path.encode("utf-8", "surrogateescape") for path in paths)
