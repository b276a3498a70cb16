"""Standard output whose failure does not end the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TextIO

from forge_rl.system.streams import reader_failure


class Output:
    """Writes to a stream until it fails (broken pipe, full disk), then drops all further output.

    output = Output(sys.stdout)
    print("hello", file=output, flush=True)
    output.failure  # "", or the error that stopped the output
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failure = ""

    @property
    def failure(self) -> str:
        return self._failure or reader_failure(self._stream)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        # Everything else, such as `isatty` and `encoding`, is the stream's.
        return getattr(self._stream, name)

    def _try(self, output: Callable[[], object]) -> None:
        if not self.failure:
            try:
                output()
            except (OSError, ValueError) as error:  # ValueError: closed
                self._failure = str(error)
