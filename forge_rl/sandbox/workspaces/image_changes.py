"""Decides which changes of an image's root count when tests judge them; turns folders of this machine into changes.

Tests run in a fresh session of the image, with the image's own shell and interpreters. A change that would run before
or with them does not count: another program in place of one of the image's, a library or module that its programs
load, a start-up file, a plugin or configuration of pytest, or a link in place of a folder with such files.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import posixpath
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forge_rl.sandbox.images.image import ContainerImage
from forge_rl.sandbox.inside import kernel
from forge_rl.sandbox.inside.images import PATH
from forge_rl.sandbox.workspaces.changes import Change, Entry

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc/alternatives")
"""Folders in which the image's own files may not change."""
_NEVER = (
    *("logs", "tests", "proc", "dev", "sys", "run", "etc/ld.so.*", "etc/profile*", "etc/bash*", "etc/environment"),
    *("etc/nsswitch.conf", "etc/ssl/openssl.cnf", "etc/pki/tls/openssl.cnf", "etc/perl"),
    *("etc/apt", "etc/apk", "etc/dnf", "etc/yum*", "etc/pip.conf", "etc/uv", "etc/xdg", "etc/wgetrc"),
)
"""Patterns of a path's first parts: what tests, or all programs, read when they start. The C library and OpenSSL load
libraries that their settings name, and installers ask the servers that theirs name."""
_NEVER_PARTS = 4
"""Maximum parts of a pattern in `_NEVER`."""
_LOADED = (
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.dist-info", "*.egg-info", "pytest.py"),
    *("_pytest", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pluggy", "__pycache__", "*.pyc"),
)
"""Patterns of names that Python or pytest load without being asked."""
_AT_ROOT = ("tox.ini", "setup.cfg", "pyproject.toml", "setup.py", "*.py")
"""Names that pytest or Python read in the root folder, where tests are one folder below."""
_HOME = (
    *(".local", ".bash*", ".profile", ".config", ".cache", ".cargo", ".zsh*", ".pythonrc*", ".pydistutils.cfg"),
    *(".pip", ".curlrc", ".wgetrc", ".npmrc"),
)
"""Patterns of names that shells, installers and interpreters read in a home folder."""
_RUNNERS = (
    *("apt", "apt-get", "bash", "conda", "curl", "dash", "env", "git", "make", "node", "npm", "npx", "pip", "pip3"),
    *("pipx", "poetry", "py.test", "pytest", "python", "python3", "sh", "tox", "uv", "uvx", "wget"),
)
"""Programs by which test scripts start tests: none is added where the image has none."""
_LIBRARIES = ("lib", "lib64")
_SHARED = ("*.so", "*.so.*")
"""Patterns of names of libraries that programs load."""
_FOR_PROCESSORS = ("*-linux-gnu*", "*-linux-musl*")
"""Patterns of folders with libraries for one kind of processor."""
_MODULE_FOLDERS = ("", "lib-dynload", "site-packages", "dist-packages")
"""Folders in the library of a Python in which modules are looked up."""
_DEFAULT_HOMES = ("root", "home/*")
_ABOVE = ("etc", "etc/ssl", "etc/pki", "etc/pki/tls", "home", *_DEFAULT_HOMES)
"""Patterns of folders in which are the files of `_NEVER`, `_SYSTEM` and `_HOME`."""


class RootNames(Protocol):
    """Names in an image's root: read from its layers on this machine, or from a listing made elsewhere."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The image's PATH and PYTHONPATH, as far as it sets them."""

    def names_in(self, folder: str) -> Collection[str]:
        """Return the names in a folder, relative to the root; none without such a folder."""


@dataclass(frozen=True)
class LayerNames:
    """The names in an image's layers on this machine, including those that a higher layer deletes."""

    image: ContainerImage

    @property
    def variables(self) -> Mapping[str, str]:
        return self.image.settings.env

    def names_in(self, folder: str) -> Collection[str]:
        return [name for layer in self.image.layers for name in _names_in(layer, folder)]


def counted(changes: Sequence[Change], root: RootNames) -> list[Change]:
    """Return the changes that count when tests judge them, in order."""
    folders = [posixpath.normpath(path).lstrip("/") for path in root.variables.get("PATH", PATH).split(":")]
    programs, modules = _ProgramFolders(root, frozenset(folders)), _PythonModules(root, folders)
    libraries = _SharedLibraries(root, modules.libraries)
    counted_changes, dropped_folders = list[Change](), list[str]()
    for change in changes:
        is_below = any(change.path.startswith(f"{folder}/") for folder in dropped_folders)
        is_hidden = modules.hides(change) or libraries.hides(change)
        if is_below or is_hidden or not _counts(change, programs, modules):
            if not is_below and change.after is not None:
                # Nothing below a folder that does not count can be put in place.
                dropped_folders.append(change.path)
            continue
        counted_changes.append(change)
    return counted_changes


class _ProgramFolders:
    """The programs of an image.

    Args:
        folders: folders in which programs are looked up.
    """

    def __init__(self, root: RootNames, folders: frozenset[str]) -> None:
        self._root, self.folders = root, folders

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for folder in self.folders for name in self._root.names_in(folder))

    def hides(self, path: str) -> bool:
        """Return True if a new file would be run in place of one of the image's programs, or of one that is missing."""
        folder, name = posixpath.split(path)
        if folder not in self.folders:
            return False
        return name in _RUNNERS or name in self._names

    def holds(self, path: str) -> bool:
        """Return True if a path is a folder of programs, or above one."""
        return any(folder == path or folder.startswith(f"{path}/") for folder in self.folders)


class _PythonModules:
    """The modules of an image's Pythons.

    Args:
        folders: folders of the image's programs; each Python has its modules next to them.
    """

    def __init__(self, root: RootNames, folders: Sequence[str]) -> None:
        self._root = root
        prefixes = {posixpath.dirname(folder) for folder in folders} | {"usr", "usr/local"}
        self.libraries = frozenset(posixpath.join(prefix, library) for prefix in prefixes for library in _LIBRARIES)
        """Folders of libraries next to the programs."""
        paths = root.variables.get("PYTHONPATH", "").split(":")
        self._paths = [posixpath.normpath(path).lstrip("/") for path in paths if path.startswith("/")]
        self._stems: dict[str, frozenset[str]] = {}

    def hides(self, change: Change) -> bool:
        """Return True if a change replaces or deletes a module, or would be imported instead: as a folder is before a
        file of its name, and a module before its namesakes in later folders."""
        entries = (change.before, change.after)
        if all(entry is not None and stat.S_ISDIR(entry.mode) for entry in entries):
            return False
        folder, name = posixpath.split(change.path)
        stem = name.partition(".")[0]
        if inner := self._inner_path(change.path):
            # In these folders, a new module hides its namesake in any other of them. Deeper, only one of its own
            # package.
            is_looked_up = posixpath.dirname(inner) in _MODULE_FOLDERS
            return stem in (self._all_stems if is_looked_up else self._stems_in(folder))
        # A project that PYTHONPATH names may change, but hide no module of the image's Pythons.
        return folder in self._paths and stem in self._python_stems

    def holds(self, path: str) -> bool:
        """Return True if a path is a folder of a Python's modules, or above one."""
        folder, name = posixpath.split(path)
        is_python = folder in self.libraries and name.startswith("python")
        return is_python or any(library == path or library.startswith(f"{path}/") for library in self.libraries)

    def _inner_path(self, path: str) -> str:
        """Return the part of a path below a Python's folder; "" if it is elsewhere."""
        for folder in self._paths:
            if posixpath.basename(folder) in _MODULE_FOLDERS and path.startswith(f"{folder}/"):
                return path[len(folder) + 1 :]
        parts = path.split("/")
        # PREFIX/lib/pythonX.Y/REST, where PREFIX must have a Python of the image: a project's own `lib` does not count.
        for place in range(len(parts) - 2):
            if "/".join(parts[: place + 1]) in self.libraries:
                return "/".join(parts[place + 2 :]) if parts[place + 1].startswith("python") else ""
        return ""

    @functools.cached_property
    def _all_stems(self) -> frozenset[str]:
        return self._python_stems.union(*map(self._stems_in, self._paths))

    @functools.cached_property
    def _python_stems(self) -> frozenset[str]:
        pythons = [
            posixpath.join(folder, name)
            for folder in self.libraries
            for name in self._stems_in(folder, keeps_suffixes=True)
            if name.startswith("python")
        ]
        folders = [posixpath.join(path, inner) for path in pythons for inner in _MODULE_FOLDERS]
        return frozenset[str]().union(*map(self._stems_in, folders))

    def _stems_in(self, folder: str, *, keeps_suffixes: bool = False) -> frozenset[str]:
        """Return the names in a folder of the image, without what follows the first dot unless `keeps_suffixes`."""
        if folder not in self._stems:
            self._stems[folder] = frozenset(self._root.names_in(folder))
        names = self._stems[folder]
        return names if keeps_suffixes else frozenset(name.partition(".")[0] for name in names)


class _SharedLibraries:
    """The shared libraries of an image, which programs look up in the folders next to them, and then in the system's.

    Args:
        folders: folders of libraries next to programs.
    """

    def __init__(self, root: RootNames, folders: frozenset[str]) -> None:
        self._root, self._folders = root, folders

    def hides(self, change: Change) -> bool:
        """Return True if a change replaces or deletes a library, or would be loaded in place of another."""
        folder, name = posixpath.split(change.path)
        if folder not in self._folders or not _matches(name, _SHARED):
            return False
        return change.before is not None or name in self._names

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        names = {folder: self._root.names_in(folder) for folder in self._folders}
        inner_folders = [
            posixpath.join(folder, name)
            for folder, folder_names in names.items()
            for name in folder_names
            if _matches(name, _FOR_PROCESSORS)
        ]
        return frozenset[str]().union(*names.values(), *map(self._root.names_in, inner_folders))


def _names_in(layer: Path, folder: str) -> list[str]:
    root = os.open(layer, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Within the layer: its links are the image's, and could lead to folders of this machine.
        fd = kernel.open_within(root, folder or "/", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return []
    finally:
        os.close(root)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _counts(change: Change, programs: _ProgramFolders, modules: _PythonModules) -> bool:
    path, name = change.path, posixpath.basename(change.path)
    parts = path.split("/")
    was_folder, is_folder = (entry is not None and stat.S_ISDIR(entry.mode) for entry in (change.before, change.after))
    if any(_matches("/".join(parts[:depth]), _NEVER) for depth in range(1, _NEVER_PARTS + 1)):
        return False
    # The image's own programs and libraries stay; the model may install new ones next to them.
    is_system = any(path == folder or path.startswith(f"{folder}/") for folder in _SYSTEM)
    if is_system and change.before is not None and not (is_folder and was_folder):
        return False
    # A link in place of a folder of programs would replace all of them.
    if programs.holds(path) and not is_folder:
        return False
    # So would one in place of a folder of modules or start-up files, in which its target's files would have other
    # paths.
    is_link = change.after is not None and stat.S_ISLNK(change.after.mode)
    is_replaced = is_link or (was_folder and change.after is not None and not is_folder)
    if is_replaced and (modules.holds(path) or _is_above(parts)):
        return False
    is_hidden = any(_matches(part, _LOADED) for part in parts) or (len(parts) == 1 and _matches(name, _AT_ROOT))
    return not (is_hidden or programs.hides(path) or _is_start_file(parts))


def _is_above(parts: Sequence[str]) -> bool:
    """Return True for a folder in which are files that tests, or all programs, read when they start."""
    return _matches("/".join(parts), tuple(pattern for pattern in _ABOVE if pattern.count("/") == len(parts) - 1))


def _is_start_file(parts: Sequence[str]) -> bool:
    for home in _DEFAULT_HOMES:
        depth = home.count("/") + 1
        if _matches("/".join(parts[:depth]), (home,)) and len(parts) > depth and _matches(parts[depth], _HOME):
            return True
    return False


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return _expression(patterns).match(name) is not None


@functools.cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return one expression for all patterns: a session may change 100,000 files."""
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


def folder_changes(folder: Path, target: str) -> list[Change]:
    """Return the files, links and folders below a folder of this machine as changes that put them into a root.

    Args:
        target: absolute path of the folder there.
    """
    place = target.strip("/")
    return [*_folders_above(place), *_entries(folder, place)]


def _folders_above(place: str) -> Iterator[Change]:
    for depth in range(1, place.count("/") + 2):
        path = "/".join(place.split("/")[:depth])
        yield Change(path=path, before=None, after=Entry(mode=stat.S_IFDIR))


def _entries(folder: Path, place: str) -> Iterator[Change]:
    for path in sorted(folder.iterdir()):
        status, name = path.lstat(), f"{place}/{path.name}"
        if stat.S_ISLNK(status.st_mode):
            yield Change(path=name, before=None, after=Entry(mode=stat.S_IFLNK, data=os.fsencode(os.readlink(path))))
        elif stat.S_ISDIR(status.st_mode):
            yield Change(path=name, before=None, after=Entry(mode=stat.S_IFDIR))
            yield from _entries(path, name)
        elif stat.S_ISREG(status.st_mode):
            mode = 0o100755 if status.st_mode & stat.S_IXUSR else 0o100644
            yield Change(path=name, before=None, after=Entry(mode=mode, data=path.read_bytes()))
