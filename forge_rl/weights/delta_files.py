"""Files of versions at an fsspec address: format and folder. Nothing is trusted, as anybody may have written a file
there."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_rl.errors import WeightsError
from forge_rl.system.remote_folders import RemoteFolder
from forge_rl.system.terminal import clipped
from forge_rl.weights.delta_codec import Kind, most_bytes
from forge_rl.weights.manifest import TensorEntry

_MOST_HEADER_BYTES = 64 << 20
_MOST_TENSORS = 1_000_000
_NAME = re.compile(r"(\d{10})(?:\.json|-\d+\.bin)")

_Count = Annotated[int, Field(ge=0, lt=1 << 48)]


class TensorChange(BaseModel):
    """A tensor of a version, and the location of its change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    name: Annotated[str, Field(min_length=1, max_length=1000)]
    shape: Annotated[tuple[_Count, ...], Field(max_length=8)]
    dtype: Literal["bfloat16", "float16", "float32"]
    fingerprint: Annotated[int, Field(ge=0, lt=1 << 64)]
    kind: Kind
    part: _Count = 0
    offset: _Count = 0
    """Offset of its first byte in the part."""
    bytes: _Count = 0
    changes: _Count = 0
    gap_bytes: Literal[1, 2, 4, 8] = 1

    @property
    def entry(self) -> TensorEntry:
        """The tensor as in a manifest."""
        return TensorEntry(
            name=self.name, shape=self.shape, dtype=self.dtype, bucket="", offset=0, fingerprint=self.fingerprint
        )


class Header(BaseModel):
    """A version at the address."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    format: Literal[1] = 1
    version: _Count
    base: _Count | None
    """Number, at the address, of the version that this one changes; None if it is full."""
    parts: Annotated[tuple[_Count, ...], Field(max_length=_MOST_TENSORS)]
    """Size of each part."""
    tensors: Annotated[tuple[TensorChange, ...], Field(min_length=1, max_length=_MOST_TENSORS)]

    def problem(self, number: int, max_bytes: int) -> str:
        """Describe why this cannot be version `number` at an address, of at most `max_bytes`; "" if it can."""
        # Bases are followed until a full version: one that is not smaller would make a circle.
        if self.base is not None and self.base >= number:
            return f"it changes a later version, {self.base}"
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            return "it has two tensors of one name"
        # Sizes are bounded from the header alone, before any part is read or memory allocated.
        if (total := sum(tensor.entry.bytes for tensor in self.tensors)) > max_bytes:
            return f"it has {total} bytes, and at most {max_bytes} are taken"
        for tensor in self.tensors:
            if tensor.kind == "same":
                fits = self.base is not None
            else:
                # In bounds of its part, and no larger than an honest encoder makes it.
                fits = tensor.part < len(self.parts) and tensor.offset + tensor.bytes <= self.parts[tensor.part]
                fits &= tensor.bytes <= most_bytes(tensor.entry.numel, tensor.entry.bytes // max(1, tensor.entry.numel))
                fits &= tensor.kind == "whole" or self.base is not None
            if not fits:
                return f"it does not hold {tensor.name!r}"
        return (
            "" if sum(self.parts) == sum(tensor.bytes for tensor in self.tensors) else "its parts hold something else"
        )


class DeltaFolder:
    """The folder of a run's versions, in any of fsspec's file systems.

    Raises:
        WeightsError: the address is of an unknown file system.
    """

    def __init__(self, address: str) -> None:
        self._files = RemoteFolder(address, flag="--weights.mirror", error=WeightsError)
        self.address = address

    def check(self) -> None:
        """Check that the address can be read; the folder need not exist yet.

        Raises:
            WeightsError: it cannot.
        """
        try:
            self.numbers()
        except OSError as error:
            raise WeightsError(
                f"--weights.mirror cannot be read: {clipped(str(error), lines=1, width=300)}",
                hint="check the address and its credentials, or leave the flag out",
            ) from error

    def numbers(self) -> list[int]:
        """Numbers of the whole versions, in order."""
        return sorted({int(name[:10]) for name in self._names() if name.endswith(".json")})

    def write(self, number: int, part: int | None, data: bytes) -> None:
        """Write a part, or the header if `part` is None; readers see either only once it is complete."""
        self._files.write(_name(number, part), data)

    def read(self, number: int, part: int | None, size: int = 0) -> bytes:
        """Read a part of a known size, or the header.

        Raises:
            FileNotFoundError: it does not exist, or no longer.
            WeightsError: it has another size.
        """
        name, max_bytes = _name(number, part), size if part is not None else _MOST_HEADER_BYTES
        data = self._files.read(name, max_bytes)
        if len(data) > max_bytes or (part is not None and len(data) != size):
            raise self.malformed(number, f"{name} has not {size} bytes")
        return data

    def header(self, number: int, max_bytes: int) -> Header:
        """Read and check a header.

        Args:
            max_bytes: maximum bytes of a version.
        """
        try:
            header = Header.model_validate_json(self.read(number, None))
        except ValidationError as error:
            first_error = error.errors(include_url=False, include_input=False)[0]
            raise self.malformed(number, f"{first_error['msg']} at {'.'.join(map(str, first_error['loc']))}") from error
        if problem := header.problem(number, max_bytes):
            raise self.malformed(number, problem)
        return header

    def remove_before(self, number: int) -> None:
        """Remove older versions, headers first."""
        # False sorts before True: headers go first, so no header is left whose parts are gone.
        old_names = sorted(
            (name for name in self._names() if int(name[:10]) < number), key=lambda name: name[-4:] == ".bin"
        )
        for name in old_names:
            self._files.remove(name)

    def malformed(self, number: int, reason: str) -> WeightsError:
        """Make the error for a version that cannot be used."""
        return WeightsError(
            f"version {number} at {self.address} cannot be used: {clipped(reason, lines=1, width=300)}",
            hint="use an address that only one run writes to",
        )

    def _names(self) -> list[str]:
        return [name for name in self._files.names() if _NAME.fullmatch(name)]


def _name(number: int, part: int | None) -> str:
    return f"{number:010d}" + (".json" if part is None else f"-{part:03d}.bin")
