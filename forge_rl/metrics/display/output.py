"""Standard output whose failure does not end the run."""

from __future__ import annotations

from typing import TextIO


class Output:
    """Writes to a stream until it fails (broken pipe, full disk), then drops all further output.

    output = Output(sys.stdout)
    print("hello", file=output, flush=True)
    output.failure  # "", or the error that stopped the output
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure = ""

    def write(self, text: str) -> int:
        if not self.failure:
            try:
                return self._stream.write(text)
            except (OSError, ValueError) as error:  # ValueError: closed
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
