"""Starts the processes that unpack layers: before their bytes are there, as Python takes as long as a small layer."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forge_rl.system.variables import handed_on

_ROOT = str(Path(__file__).parents[3])
_PROGRAM = """import sys
for name in ("forge_rl", "forge_rl.sandbox", "forge_rl.sandbox.images", "forge_rl.sandbox.inside"):
    sys.modules[name] = package = type(sys)(name)
    package.__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
from forge_rl.sandbox.images.unpack import main
main()"""
"""Leaves out what the packages themselves import, which no unpacking needs."""
_CHECK_S = 0.05


class Unpacker:
    """A process that unpacks one layer; before it has begun, it ends with this process.

    unpacker = Unpacker()
    status, output, errors = unpacker.unpack({"start": 0, "size": 99, "folder": "/x", "limits": {}}, [fd], lambda: None)
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-c", _PROGRAM, _ROOT],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=handed_on(),
            )

    def unpack(
        self, arguments: Mapping[str, object], fds: Sequence[int], check_wanted: Callable[[], None]
    ) -> tuple[int, bytes, bytes]:
        """Unpack; return the exit status, stdout and stderr.

        Args:
            arguments: request for `unpack.main`.
            fds: the file with the layer, and files whose locks the process shares, as it may outlive this one.
            check_wanted: called again and again; raises if nobody waits any more, which ends the process.
        """
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, and says why
                socket.send_fds(self._socket, [json.dumps(arguments).encode()], fds)
            self._socket.close()
            while True:
                try:
                    output, errors = self._process.communicate(timeout=_CHECK_S)
                    return self._process.returncode, output, errors
                except subprocess.TimeoutExpired:
                    check_wanted()
        finally:
            self.close()

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
