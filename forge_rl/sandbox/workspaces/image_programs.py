"""Finds the programs of an image that test scripts run: by PATH, through links, and behind virtual environments."""

from __future__ import annotations

import fnmatch
import functools
import os
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forge_rl.sandbox.images.image import ContainerImage
from forge_rl.sandbox.inside import kernel
from forge_rl.sandbox.inside.images import PATH

RUNNERS = (
    *("apt", "apt-get", "bash", "conda", "curl", "dash", "env", "git", "make", "node", "npm", "npx", "pip", "pip3"),
    *("pipx", "poetry", "py.test", "pytest", "python", "python3", "sh", "tox", "uv", "uvx", "wget"),
)
"""Programs by which test scripts start tests: none is added where the image has none."""
_STARTERS = (*RUNNERS, "python*", "pypy*", "perl", "ruby")
"""Patterns of programs that start tests or run scripts; files next to the real program count as the image's, too."""
LOADED_VARIABLES = ("BASH_ENV", "ENV", "LD_PRELOAD")
"""Variables that name files which shells, or all programs, load when they start."""
CONFIG = "pyvenv.cfg"
"""Settings of a virtual environment, next to its Python or one folder above."""
_HOME = re.compile(r"^home[ \t]*=[ \t]*(/.*?)[ \t\r]*$", re.MULTILINE)
_INTERPRETER = re.compile(r"#![ \t]*(/[^\s]+)")
_MAX_LINKS = 40
_MAX_TEXT = 1 << 12


class RootNames(Protocol):
    """Names in an image's root: read from its layers on this machine, or from a listing made elsewhere.

    Paths are relative to the root, and lead through no link.
    """

    @property
    def variables(self) -> Mapping[str, str]:
        """The image's variables, as far as they are known; PATH and PYTHONPATH are."""

    def names_in(self, folder: str) -> Collection[str]:
        """Return the names in a folder; none without such a folder."""

    def links_in(self, folder: str) -> Mapping[str, str]:
        """Return the targets of the links in a folder by name."""

    def text_of(self, path: str) -> str:
        """Return the start of a small file; "" if there is none, or if it is not known."""


@dataclass(frozen=True)
class LayerNames:
    """The names in an image's layers on this machine, including those that a higher layer deletes."""

    image: ContainerImage

    @property
    def variables(self) -> Mapping[str, str]:
        return self.image.settings.env

    def names_in(self, folder: str) -> Collection[str]:
        return [name for layer in self.image.layers for name in _names_in(layer, folder)]

    def links_in(self, folder: str) -> Mapping[str, str]:
        targets = dict[str, str]()
        for layer in self.image.layers:
            with _opened(layer, folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
                for entry in os.scandir(fd) if fd is not None else ():
                    # A higher layer may have something else in place of a link.
                    targets.pop(entry.name, None)
                    if entry.is_symlink():
                        targets[entry.name] = os.readlink(entry.name, dir_fd=fd)
        return targets

    def text_of(self, path: str) -> str:
        for layer in reversed(self.image.layers):
            # A pipe would block the open without O_NONBLOCK.
            with _opened(layer, path, os.O_RDONLY | os.O_NONBLOCK) as fd:
                if fd is not None:
                    return _start_of(fd)
        return ""


def _names_in(layer: Path, folder: str) -> list[str]:
    with _opened(layer, folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        return [] if fd is None else os.listdir(fd)


@contextmanager
def _opened(layer: Path, path: str, flags: int) -> Iterator[int | None]:
    """Open a path of a layer, within it: its links are the image's, and could lead to folders of this machine."""
    root = os.open(layer, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = kernel.open_within(root, path or "/", flags)
    except OSError:
        yield None
        return
    finally:
        os.close(root)
    try:
        yield fd
    finally:
        os.close(fd)


def _start_of(fd: int) -> str:
    try:
        return os.read(fd, _MAX_TEXT).decode("utf-8", "replace")
    except OSError:  # a folder, or a pipe
        return ""


class RootLinks:
    """Resolves links of an image across its layers."""

    def __init__(self, root: RootNames) -> None:
        self._links_in = functools.cache(root.links_in)
        self.on_the_way = set[str]()
        """Paths of all links that `real` has followed."""

    def real(self, path: str) -> str:
        """Return the path, relative to the root, to which a path leads."""
        real, parts, links_left = list[str](), path.split("/")[::-1], _MAX_LINKS
        while parts:
            part = parts.pop()
            if part in ("", "."):
                continue
            if part == "..":
                del real[-1:]
                continue
            target = self._links_in("/".join(real)).get(part)
            real.append(part)
            if target is None or not links_left:
                continue
            links_left -= 1
            self.on_the_way.add("/".join(real))
            real = [] if target.startswith("/") else real[:-1]
            parts += target.split("/")[::-1]
        return "/".join(real)


class ImagePrograms:
    """The programs of an image.

    Args:
        variables: of the tests.
        work: folder of the task, relative to the root; "" for none.
    """

    def __init__(self, root: RootNames, links: RootLinks, variables: Mapping[str, str], *, work: str) -> None:
        self._root, self._links, self._work = root, links, work
        self._reached = set[str]()
        self.folders = self._all_folders(search_folders(variables.get("PATH", PATH)))
        """Folders in which programs are looked up, and those to which links, virtual environments and scripts lead."""
        for name in LOADED_VARIABLES:
            for path in search_folders(variables.get(name, "").replace(" ", ":")):
                self._reached |= {path, links.real(path)}

    def _all_folders(self, path: list[str]) -> frozenset[str]:
        folders, next_folders = set[str](), [*path]
        while next_folders:
            folder = next_folders.pop()
            if folder in folders:
                continue
            folders.add(folder)
            next_folders.append(real := self._links.real(folder))
            if real == folder:
                next_folders += self._leads_to(folder)
        return frozenset(folders)

    def _leads_to(self, folder: str) -> Iterator[str]:
        """Yield the folders of other programs that those in a folder run."""
        for place in (folder, posixpath.dirname(folder)):
            if match := _HOME.search(self._root.text_of(posixpath.join(place, CONFIG))):
                yield match[1].strip("/")
        for name in {*self._root.links_in(folder), *filter(_is_starter, self._root.names_in(folder))}:
            target = self._links.real(posixpath.join(folder, name))
            if _is_starter(name):
                self._reached.add(target)
                yield posixpath.dirname(target)
                interpreter = _INTERPRETER.match(self._root.text_of(target))
                if interpreter is not None and _is_starter(posixpath.basename(interpreter[1])):
                    yield posixpath.dirname(interpreter[1].strip("/"))
            elif not (self._work and target.startswith(f"{self._work}/")):
                self._reached.add(target)

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for folder in self.folders for name in self._root.names_in(folder))

    def hides(self, path: str) -> bool:
        """Return True if a new file would be run in place of one of the image's programs, or of one that is missing."""
        folder, name = posixpath.split(path)
        if folder not in self.folders:
            return False
        return name in RUNNERS or name in self._names

    def is_reached(self, path: str) -> bool:
        """Return True for a file that one of the image's programs leads to, and for a link on the way."""
        return path in self._reached or path in self._links.on_the_way

    def holds(self, path: str) -> bool:
        """Return True if a path is a folder of programs, or above one, or above a file that a program leads to."""
        return any(folder == path or folder.startswith(f"{path}/") for folder in self.folders) or path in self._above

    @functools.cached_property
    def _above(self) -> frozenset[str]:
        paths = set[str]()
        for path in self._reached | self._links.on_the_way:
            while path := posixpath.dirname(path):
                paths.add(path)
        return frozenset(paths)


def search_folders(variable: str) -> list[str]:
    """Return the absolute folders of a variable such as PATH, relative to the root."""
    return [posixpath.normpath(path).lstrip("/") for path in variable.split(":") if path.startswith("/")]


def _is_starter(name: str) -> bool:
    return matches(name, _STARTERS)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return True if a name matches one of the patterns."""
    return _expression(patterns).match(name) is not None


@functools.cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return one expression for all patterns: a session may change 100,000 files."""
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")
