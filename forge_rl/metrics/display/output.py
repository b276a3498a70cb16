"""Standard output that a run outlives: once it cannot be written, nothing more is."""

from __future__ import annotations

from typing import TextIO


class Output:
    """Writes to a stream until that fails, as whoever read it has gone or the disk is full, and then drops all.

    output = Output(sys.stdout)
    print("hello", file=output, flush=True)
    output.failure  # "" or why nothing is written any more
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure = ""

    def write(self, text: str) -> int:
        if not self.failure:
            try:
                return self._stream.write(text)
            except (OSError, ValueError) as error:  # ValueError: it is closed
                self.failure = str(error)
        return len(text)

    def flush(self) -> None:
        if not self.failure:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self.failure = str(error)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return self._stream.encoding
