"""Decides which changes of an image's root count when tests judge them; turns folders of this machine into changes.

Tests run in a fresh session of the image, with the image's own shell and interpreters. A change that would run before
or with them does not count: another program in place of one of the image's, also of one that is reached through links
or a virtual environment, a library or module that its programs load, a start-up file, a plugin or configuration of
pytest, or a link in place of a folder with such files. Which programs there are is in `image_programs`.
"""

from __future__ import annotations

import functools
import glob
import os
import posixpath
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from forge_rl.sandbox.workspaces.changes import Change, Entry
from forge_rl.sandbox.workspaces.image_programs import (
    CONFIG,
    ImagePrograms,
    RootLinks,
    RootNames,
    matches,
    search_folders,
)

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc/alternatives")
"""Folders in which the image's own files may not change."""
_NEVER = (
    *("logs", "tests", "proc", "dev", "sys", "run", "etc/ld.so.*", "etc/profile*", "etc/bash*", "etc/environment"),
    *("etc/nsswitch.conf", "etc/ssl/openssl.cnf", "etc/pki/tls/openssl.cnf", "etc/perl"),
    *("etc/apt", "etc/apk", "etc/dnf", "etc/yum*", "etc/pip.conf", "etc/uv", "etc/xdg", "etc/wgetrc"),
    *("etc/dpkg", "var/lib/apt", "var/cache/apt", "var/cache/apk", "var/lib/dpkg/info/*.p*inst"),
    *("var/lib/dpkg/info/*.p*rm", "var/lib/dpkg/info/*.triggers", "var/lib/dpkg/triggers"),
)
"""Patterns of a path's first parts: what tests, or all programs, read when they start. The C library and OpenSSL load
libraries that their settings name; installers ask the servers that theirs name, trust the lists of packages that they
have, and run scripts of packages that are installed."""
_NEVER_PARTS = 5
"""Maximum parts of a pattern in `_NEVER`."""
_LOADED = (
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.dist-info", "*.egg-info", "pytest.py"),
    *("_pytest", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pluggy", "__pycache__", "*.pyc"),
    *("pip.conf", "uv.toml"),
)
"""Patterns of names that Python, pytest or installers load without being asked."""
_LAYOUT = ("pyvenv.cfg", "pybuilddir.txt", "Modules")
"""Names next to a Python by which it finds its own modules elsewhere."""
_ZIPPED = ("python*.zip",)
"""Names of archives in which a Python looks its own modules up first; images have none."""
_ELSEWHERE = frozenset({"_msi", "_overlapped", "_scproxy", "_winapi", "_winreg", "msvcrt", "nt", "vms_lib", "winreg"})
"""Modules of other systems that Python's own modules import where they exist, as `subprocess` does msvcrt."""
_AT_ROOT = ("tox.ini", "setup.cfg", "pyproject.toml", "setup.py", "*.py")
"""Names that pytest or Python read in the root folder, where tests are one folder below."""
_HOME = (
    *(".local", ".bash*", ".profile", ".config", ".cache", ".cargo", ".zsh*", ".pythonrc*", ".pydistutils.cfg"),
    *(".pip", ".curlrc", ".wgetrc", ".npmrc"),
)
"""Patterns of names that shells, installers and interpreters read in a home folder."""
_LIBRARIES = ("lib", "lib64")
_SHARED = ("*.so", "*.so.*")
"""Patterns of names of libraries that programs load."""
_FOR_PROCESSORS = ("*-linux-gnu*", "*-linux-musl*")
"""Patterns of folders with libraries for one kind of processor."""
_MODULE_FOLDERS = ("", "lib-dynload", "site-packages", "dist-packages")
"""Folders in the library of a Python in which modules are looked up."""
_DEFAULT_HOMES = ("", "root", "home/*")
"""Homes of users; of one that the image does not know, the root."""
_ABOVE = ("etc", "etc/ssl", "etc/pki", "etc/pki/tls", "home", "root", "home/*")
"""Patterns of folders in which are the files of `_NEVER`, `_SYSTEM` and `_HOME`."""


def counted(
    changes: Sequence[Change],
    root: RootNames,
    *,
    variables: Mapping[str, str] | None = None,
    home: str = "",
    work: str = "",
) -> list[Change]:
    """Return the changes that count when tests judge them, in order.

    Args:
        variables: of the tests, in addition to the image's.
        home: home folder of the tests' user, besides /root and those in /home.
        work: folder of the task. Programs there may change, also if a link among the image's programs leads to one,
            unless it is an interpreter or another program that starts tests.
    """
    variables = {**root.variables, **(variables or {})}
    links = RootLinks(root)
    programs = ImagePrograms(root, links, variables, work=work.strip("/"))
    modules = _PythonModules(root, links, programs.folders, variables.get("PYTHONPATH", ""))
    library_path = [links.real(folder) for folder in search_folders(variables.get("LD_LIBRARY_PATH", ""))]
    libraries = _SharedLibraries(root, modules.libraries.union(library_path))
    homes = frozenset([*_DEFAULT_HOMES, *(glob.escape(path) for path in (home.strip("/"), links.real(home)))])
    counted_changes, dropped_folders = list[Change](), list[str]()
    for change in changes:
        is_below = any(change.path.startswith(f"{folder}/") for folder in dropped_folders)
        is_hidden = modules.hides(change) or libraries.hides(change)
        if is_below or is_hidden or not _counts(change, programs, modules, homes):
            if not is_below and change.after is not None:
                # Nothing below a folder that does not count can be put in place.
                dropped_folders.append(change.path)
            continue
        counted_changes.append(change)
    return counted_changes


class _PythonModules:
    """The modules of an image's Pythons.

    Args:
        folders: folders of the image's programs; each Python has its modules next to them.
        python_path: PYTHONPATH of the tests.
    """

    def __init__(self, root: RootNames, links: RootLinks, folders: Collection[str], python_path: str) -> None:
        self._root = root
        self._folders = folders
        self._prefixes = {posixpath.dirname(folder) for folder in folders} | {"usr", "usr/local"}
        libraries = [posixpath.join(prefix, library) for prefix in self._prefixes for library in _LIBRARIES]
        self.libraries = frozenset([*libraries, *map(links.real, libraries)])
        """Folders of libraries next to the programs."""
        pythons = [posixpath.join(folder, name) for folder in self.libraries for name in root.names_in(folder)]
        self._real_pythons = {links.real(path) for path in pythons if posixpath.basename(path).startswith("python")}
        paths = search_folders(python_path)
        self._paths = [*paths, *map(links.real, paths)]
        self._stems: dict[str, frozenset[str]] = {}

    def hides(self, change: Change) -> bool:
        """Return True if a change replaces or deletes a module, or would be imported instead: as a folder is before a
        file of its name, and a module before its namesakes in later folders."""
        entries = (change.before, change.after)
        if all(entry is not None and stat.S_ISDIR(entry.mode) for entry in entries):
            return False
        folder, name = posixpath.split(change.path)
        stem = name.partition(".")[0]
        if folder in self.libraries and matches(name, _ZIPPED):
            return True
        # Jython's, which `copy` and `pickle` import where it exists.
        if stem == "python" and posixpath.basename(folder) == "org":
            return True
        # A virtual environment has its settings one folder above.
        if name in _LAYOUT and (folder in self._folders or (name == CONFIG and folder in self._prefixes)):
            return True
        if inner := self._inner_path(change.path):
            # In these folders, a new module hides its namesake in any other of them. Deeper, only one of its own
            # package.
            is_looked_up = posixpath.dirname(inner) in _MODULE_FOLDERS
            return stem in (self._all_stems | _ELSEWHERE if is_looked_up else self._stems_in(folder))
        # A project that PYTHONPATH names may change, but hide no module of the image's Pythons.
        return folder in self._paths and stem in self._python_stems | _ELSEWHERE

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
        for folder in self._real_pythons:
            if path.startswith(f"{folder}/"):
                return path[len(folder) + 1 :]
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
        paths = self._real_pythons.union(pythons)
        folders = [posixpath.join(path, inner).rstrip("/") for path in paths for inner in _MODULE_FOLDERS]
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
        folders: folders of libraries next to programs, and the folders of LD_LIBRARY_PATH.
    """

    def __init__(self, root: RootNames, folders: frozenset[str]) -> None:
        self._root, self._folders = root, folders

    def hides(self, change: Change) -> bool:
        """Return True if a change replaces or deletes a library, or would be loaded in place of another."""
        folder, name = posixpath.split(change.path)
        if folder not in self._folders or not matches(name, _SHARED):
            return False
        return change.before is not None or name in self._names

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        names = {folder: self._root.names_in(folder) for folder in self._folders}
        inner_folders = [
            posixpath.join(folder, name)
            for folder, folder_names in names.items()
            for name in folder_names
            if matches(name, _FOR_PROCESSORS)
        ]
        return frozenset[str]().union(*names.values(), *map(self._root.names_in, inner_folders))


def _counts(change: Change, programs: ImagePrograms, modules: _PythonModules, homes: frozenset[str]) -> bool:
    path, name = change.path, posixpath.basename(change.path)
    parts = path.split("/")
    was_folder, is_folder = (entry is not None and stat.S_ISDIR(entry.mode) for entry in (change.before, change.after))
    if any(matches("/".join(parts[:depth]), _NEVER) for depth in range(1, _NEVER_PARTS + 1)):
        return False
    # The image's own programs and libraries stay; the model may install new ones next to them.
    is_system = any(path == folder or path.startswith(f"{folder}/") for folder in _SYSTEM)
    if is_system and change.before is not None and not (is_folder and was_folder):
        return False
    # A link in place of a folder of programs would replace all of them.
    if programs.holds(path) and not is_folder:
        return False
    if programs.is_reached(path) and not (was_folder and is_folder):
        return False
    # So would one in place of a folder of modules or start-up files, in which its target's files would have other
    # paths.
    is_link = change.after is not None and stat.S_ISLNK(change.after.mode)
    is_replaced = is_link or (was_folder and change.after is not None and not is_folder)
    if is_replaced and (modules.holds(path) or _is_above(parts) or _is_home(parts, homes)):
        return False
    is_hidden = any(matches(part, _LOADED) for part in parts) or (len(parts) == 1 and matches(name, _AT_ROOT))
    return not (is_hidden or programs.hides(path) or _is_start_file(parts, homes))


def _is_above(parts: Sequence[str]) -> bool:
    """Return True for a folder in which are files that tests, or all programs, read when they start."""
    return matches("/".join(parts), tuple(pattern for pattern in _ABOVE if pattern.count("/") == len(parts) - 1))


def _is_home(parts: Sequence[str], homes: Collection[str]) -> bool:
    """Return True for a home folder, and for a folder above one."""
    path = "/".join(parts)
    return any(f"{home}/".startswith(f"{path}/") for home in homes)


def _is_start_file(parts: Sequence[str], homes: Collection[str]) -> bool:
    for home in homes:
        depth = len(home.split("/")) if home else 0
        is_below = matches("/".join(parts[:depth]), (home,))
        if is_below and len(parts) > depth and matches(parts[depth], _HOME):
            return True
    return False


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
