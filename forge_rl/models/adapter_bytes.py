"""An adapter's files as bytes, to be sent to other processes and hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge_rl.errors import ModelError
from forge_rl.models.adapters import CONFIG, WEIGHTS

_MAX_CONFIG_BYTES, _MAX_BYTES = 1 << 20, 16 << 30


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterFiles:
    """An adapter's files as they were when read, to be sent to other processes and hosts.

    AdapterFiles.read(folder).write(other_folder)
    """

    config: bytes
    weights: bytes

    @staticmethod
    def read(folder: Path) -> AdapterFiles:
        """Read an adapter's files without parsing them.

        Raises:
            ModelError: a file is missing, cannot be read, or is larger than adapters are.
        """
        contents = []
        for name, max_bytes in ((CONFIG, _MAX_CONFIG_BYTES), (WEIGHTS, _MAX_BYTES)):
            try:
                size = (folder / name).stat().st_size
                contents.append((folder / name).read_bytes() if size <= max_bytes else b"")
            except OSError as error:
                raise ModelError(
                    f"{folder / name} cannot be read: {error.strerror or error}",
                    hint=f"give a folder with {CONFIG} and {WEIGHTS}, as PEFT writes it",
                ) from error
            if size > max_bytes:
                raise ModelError(
                    f"{folder / name} has {size} bytes, more than {max_bytes}", hint="write the adapter again"
                )
        return AdapterFiles(config=contents[0], weights=contents[1])

    def write(self, folder: Path) -> None:
        """Write the files into an existing folder; raises OSError if it cannot be written."""
        (folder / CONFIG).write_bytes(self.config)
        (folder / WEIGHTS).write_bytes(self.weights)
