"""Logs of processes on hosts that do not see the controller's disk: kept there, and sent to it piece by piece."""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

MOST_BYTES = 1 << 20
"""Maximum bytes of logs in one answer."""


def new_name() -> str:
    """Return a name for `own_logs` that nobody can guess, and so create the folder first."""
    return f"forge_rl-{secrets.token_hex(8)}"


def own_logs(name: str) -> Path:
    """Return the private folder of this host's logs, inside the temporary folder and removed with it."""
    folder = Path(tempfile.gettempdir(), name)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def open_log(path: str | Path, _flags: int = 0) -> int:
    """Open a log to append to it, not through a link; returns a descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)


def new_output(name: str, offsets: Mapping[str, int]) -> dict[str, bytes]:
    """Return the next bytes of this host's logs, a megabyte at most.

    Args:
        name: see `own_logs`.
        offsets: bytes of each log that earlier calls returned.
    """
    output, room = dict[str, bytes](), MOST_BYTES
    # Logs with the least output first, so that one that grows without pause does not hold up the others.
    for log, begin in sorted(offsets.items(), key=operator.itemgetter(1)):
        with contextlib.suppress(FileNotFoundError), (own_logs(name) / log).open("rb") as file:
            file.seek(begin)
            if data := file.read(room):
                output[log] = data
                room -= len(data)
    return output


class GatheredLogs:
    """Appends the output of other hosts' processes to logs on this host.

    Args:
        folder: folder of the logs.
    """

    def __init__(self, folder: Path) -> None:
        self.name = new_name()
        """Name of the folder on the other hosts, see `own_logs`."""
        self._folder = folder
        self._offsets: dict[str, dict[str, int]] = {}

    def expect(self, host: str, log: str) -> None:
        """Take a log of this name from a host from now on, and create it."""
        os.close(open_log(self._folder / log))
        self._offsets.setdefault(host, {}).setdefault(log, 0)

    def take(self, host: str, output: Mapping[str, bytes]) -> dict[str, int]:
        """Append a host's new output; return the bytes taken so far from each log expected from that host."""
        offsets = self._offsets.get(host, {})
        for log in output.keys() & offsets.keys():
            with contextlib.suppress(OSError), open(self._folder / log, "ab", opener=open_log) as file:
                file.write(output[log])  # a full disk costs the output, as it does on this host
            # Counted even if the write failed, as the host would otherwise send the same bytes again forever.
            offsets[log] += len(output[log])
        return dict(offsets)
