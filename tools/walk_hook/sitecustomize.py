"""Records when each function of forge_rl is entered, in every process that has this folder on its PYTHONPATH.

Functions are rewritten as their modules are imported: their first statement writes the time to a file of the process,
by a mapping that needs no system call and outlives a kill. Unlike a profiler, this slows no other code, and works in
threads and coroutines. A sandbox's server starts with a clean environment, so its program is rewritten, too.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import mmap
import os
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

FOLDER = "FORGE_RL_WALKS"
"""Environment variable with the folder to write to."""
ENTRY = struct.Struct("<dII")
"""Seconds of the monotonic clock, CRC-32 of the file's path in forge_rl, line of the function."""
MAX_ENTRIES = 1 << 22
"""Number of entries that the file of a process has room for."""
_MIN_INTERVAL_S = 0.0002
"""Minimum time between two recorded entries of a function."""
_SERVER = """import os, sys
os.environ[{variable!r}] = {folder!r}
sys.path.insert(0, {hook!r})
import sitecustomize
del sys.path[0]
"""


class Recorder:
    """Writes the entries of this process, and of its forks to files of their own."""

    def __init__(self, folder: str) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # remains valid where the root is another
        self._open()
        os.register_at_fork(after_in_child=self._open)

    def _open(self) -> None:
        name = f"{os.getpid()}-{time.monotonic_ns()}"
        self._last: dict[tuple[int, int], float] = {}
        self._slots = itertools.count()
        self._map: mmap.mmap | None = None
        try:
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._folder)
        except OSError:  # a process that a session's code started: all that it inherited is closed
            return
        os.ftruncate(file, ENTRY.size * MAX_ENTRIES)
        self._map = mmap.mmap(file, ENTRY.size * MAX_ENTRIES)
        os.close(file)

    def enter(self, file: int, line: int) -> None:
        """Record that a function was entered."""
        time_s = time.monotonic()
        if self._map is not None and time_s - self._last.get((file, line), 0.0) > _MIN_INTERVAL_S:
            self._last[file, line] = time_s
            ENTRY.pack_into(self._map, next(self._slots) * ENTRY.size, time_s, file, line)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        """Compile the source, never what an untraced process has compiled."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        file = zlib.crc32(path.rpartition("/forge_rl/")[2].encode())
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue  # compiled for a device, or by numba
            call = ast.parse(f"__enter_function__({file}, {node.lineno})").body[0]
            node.body.insert(int(ast.get_docstring(node, clean=False) is not None), call)
            for part in ast.walk(call):
                ast.copy_location(part, node)
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "forge_rl.sandbox.host":
            hook = os.path.dirname(os.path.abspath(__file__))
            prelude = _SERVER.format(variable=FOLDER, folder=os.environ[FOLDER], hook=hook)
            vars(module)["_PROGRAM"] = prelude + vars(module)["_PROGRAM"]


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "forge_rl":
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, str(spec.loader.path))
        return spec


if __name__ == "sitecustomize" and FOLDER in os.environ:
    vars(builtins)["__enter_function__"] = Recorder(os.environ[FOLDER]).enter
    sys.meta_path.insert(0, _Finder())
