"""Results and limits as JSON, for sandboxes behind HTTP and for kept results. What is read is checked."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import asdict, fields

from forge_rl.errors import ConfigError
from forge_rl.sandbox.limits import MEDIA_TYPES, CellError, Image, Limits, Result, Usage

_MOST_STATUS = 1 << 16
_FRACTIONS = ("wall_s", "cpu_s", "cpus")


class WireError(Exception):
    """Invalid JSON content, with the reason as its message."""


def result_to_json(result: Result) -> dict[str, object]:
    """Return a result as JSON's types; an image's bytes in base64."""
    made = asdict(result)
    if result.image is not None:
        made["image"]["data"] = base64.b64encode(result.image.data).decode()
    return made


def result_from_json(found: object, limits: Limits) -> Result:
    """Check a result and cut its texts to their limits.

    Raises:
        WireError: it is not a result.
    """
    top = _object(found, "result")
    usage = _object(top.get("usage"), "usage")
    error = None
    if top.get("error") is not None:
        told = _object(top["error"], "error")
        error = CellError(
            name=_text(told, "name")[:200],
            message=_text(told, "message")[: limits.output_bytes],
            traceback=_text(told, "traceback")[: limits.output_bytes],
        )
    status = top.get("status")
    if status is not None and (isinstance(status, bool) or not isinstance(status, int) or abs(status) > _MOST_STATUS):
        raise WireError("its status is not one")
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
        WireError: it is not base64, or does not begin like its type.
    """
    found = unpacked(data)
    if media_type not in MEDIA_TYPES or not found.startswith(MEDIA_TYPES[media_type]):
        raise WireError("its image is not of its type")
    return Image(media_type=media_type, data=found)


def unpacked(data: str) -> bytes:
    """Return bytes that were sent in base64.

    Raises:
        WireError: it is not base64.
    """
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise WireError("its data is not base64") from None


def limits_from_json(found: object, most: Limits) -> Limits:
    """Return limits that somebody asks for; those that are not named are the most that is allowed.

    Raises:
        WireError: a limit does not exist, is not a number, or is above the most that is allowed.
    """
    asked: dict[str, float | int | None] = {}
    known = [one.name for one in fields(Limits)]
    for name, value in _object(found, "limits").items():
        if name not in known:
            raise WireError(f"unknown limit {name[:100]!r}; limits are {', '.join(known)}")
        if value is None and name == "cpu_s" and most.cpu_s is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise WireError(f"the limit {name} is not a number")
        allowed = getattr(most, name)
        if allowed is not None and value > allowed:
            raise WireError(f"the limit {name} is above the server's, {allowed}")
        asked[name] = float(value) if name in _FRACTIONS else int(value)
    try:
        return Limits(**{**asdict(most), **asked})
    except ConfigError as error:
        raise WireError(f"{error.message}; {error.hint}") from None


def _object(found: object, name: str) -> Mapping[str, object]:
    if not isinstance(found, dict):
        raise WireError(f"its {name} is not an object")
    return found


def _text(found: Mapping[str, object], name: str) -> str:
    text = found.get(name)
    if not isinstance(text, str):
        raise WireError(f"its {name} is not a string")
    return text


def _number(found: Mapping[str, object], name: str) -> float:
    number = found.get(name)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1e18:
        raise WireError(f"its {name} is not a size")
    return float(number)


def _image(found: Mapping[str, object]) -> Image:
    return image_of(_text(found, "media_type"), _text(found, "data"))
