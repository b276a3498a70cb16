"""Results and limits as JSON, for sandboxes behind HTTP and for cached results. All that is read is checked."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import asdict, fields

from forge_rl.errors import ConfigError
from forge_rl.sandbox.limits import MEDIA_TYPES, CellError, Image, Limits, Result, Usage

MAX_WAIT_S = 600.0
"""Longest wait for a place on a server, also of requests that name none."""
_MOST_STATUS = 1 << 16
_FRACTIONS = ("wall_s", "cpu_s", "cpus")


class SandboxWireError(Exception):
    """Invalid JSON content, with the reason as its message."""


def result_to_json(result: Result) -> dict[str, object]:
    """Return a result as JSON's types; an image's bytes in base64."""
    values = asdict(result)
    if result.image is not None:
        values["image"]["data"] = base64.b64encode(result.image.data).decode()
    return values


def result_from_json(data: object, limits: Limits) -> Result:
    """Check a result and cut its texts to their limits.

    Raises:
        SandboxWireError: it is not a result.
    """
    top = _object(data, "result")
    usage = _object(top.get("usage"), "usage")
    error = None
    if top.get("error") is not None:
        details = _object(top["error"], "error")
        error = CellError(
            name=_text(details, "name")[:200],
            message=_text(details, "message")[: limits.output_bytes],
            traceback=_text(details, "traceback")[: limits.output_bytes],
        )
    status = top.get("status")
    if status is not None and (isinstance(status, bool) or not isinstance(status, int) or abs(status) > _MOST_STATUS):
        raise SandboxWireError("its status is not one")
    value = None if top.get("value") is None else _text(top, "value")[: limits.output_bytes]
    return Result(
        stdout=_text(top, "stdout")[: limits.output_bytes],
        stderr=_text(top, "stderr")[: limits.output_bytes],
        value=value,
        image=None if top.get("image") is None else _image(_object(top["image"], "image")),
        error=error,
        usage=Usage(
            wall_s=_number(usage, "wall_s"),
            cpu_s=_number(usage, "cpu_s"),
            memory_bytes=int(_number(usage, "memory_bytes")),
        ),
        cut=top.get("cut") is True,
        status=status,
    )


def image_of(media_type: str, data: str) -> Image:
    """Return an image that was sent in base64.

    Raises:
        SandboxWireError: it is not base64, or does not begin like its type.
    """
    image_bytes = unpacked(data)
    if media_type not in MEDIA_TYPES or not image_bytes.startswith(MEDIA_TYPES[media_type]):
        raise SandboxWireError("its image is not of its type")
    return Image(media_type=media_type, data=image_bytes)


def unpacked(data: str) -> bytes:
    """Return bytes that were sent in base64.

    Raises:
        SandboxWireError: it is not base64.
    """
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise SandboxWireError("its data is not base64") from None


def limits_from_json(data: object, max_limits: Limits) -> Limits:
    """Return the limits that a client asks for; a limit that is not named gets its maximum.

    Raises:
        SandboxWireError: a limit does not exist, is not a number, or is above its maximum.
    """
    values: dict[str, float | int | None] = {}
    names = [field.name for field in fields(Limits)]
    for name, value in _object(data, "limits").items():
        if name not in names:
            raise SandboxWireError(f"unknown limit {name[:100]!r}; limits are {', '.join(names)}")
        if value is None and name == "cpu_s" and max_limits.cpu_s is None:
            continue
        # bool is an int in Python, and JSON's parser takes NaN and Infinity: neither may become a limit.
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SandboxWireError(f"the limit {name} is not a number")
        maximum = getattr(max_limits, name)
        if maximum is not None and value > maximum:
            raise SandboxWireError(f"the limit {name} is above the server's, {maximum}")
        values[name] = float(value) if name in _FRACTIONS else int(value)
    try:
        return Limits(**{**asdict(max_limits), **values})
    except ConfigError as error:
        raise SandboxWireError(f"{error.message}; {error.hint}") from None


def _object(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise SandboxWireError(f"its {name} is not an object")
    return value


def _text(values: Mapping[str, object], name: str) -> str:
    text = values.get(name)
    if not isinstance(text, str):
        raise SandboxWireError(f"its {name} is not a string")
    return text


def _number(values: Mapping[str, object], name: str) -> float:
    number = values.get(name)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1e18:
        raise SandboxWireError(f"its {name} is not a size")
    return float(number)


def _image(values: Mapping[str, object]) -> Image:
    return image_of(_text(values, "media_type"), _text(values, "data"))
