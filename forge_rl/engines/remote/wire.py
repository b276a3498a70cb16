"""Messages between the two ends of a remote engine, as JSON, and the framing of weights. Malformed ones are refused.

Floats keep their exact value: JSON holds the shortest decimals that read back as the same number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from forge_rl.errors import AttestationError, ConfigError, ForgeError, WeightsError
from forge_rl.system.terminal import visible
from forge_rl.token_arrays import CacheUse, Chunk, ScoredTokens
from forge_rl.types import Sampling
from forge_rl.weights.manifest import LoadReport, Manifest, TensorEntry

MOST_LINE = 16 << 20
"""Maximum size of a message, in bytes."""
ALIGN = 64
"""Alignment of tensors in a bucket, in bytes."""
_DTYPES = ("float32", "bfloat16", "float16")
_MOST_SHOWN = 500
_KINDS: dict[str, type[ForgeError]] = {"config": ConfigError, "weights": WeightsError, "attestation": AttestationError}


class WireError(Exception):
    """A malformed message."""


def read_object(data: bytes, *, max_bytes: int = MOST_LINE) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        WireError: it is something else, or too long.
    """
    if len(data) > max_bytes:
        raise WireError(f"a message has more than {max_bytes} bytes")
    try:
        payload = json.loads(data)
    # Deeply nested JSON exceeds Python's recursion limit.
    except (ValueError, RecursionError):
        payload = None
    if not isinstance(payload, dict):
        raise WireError(f"a message is not a JSON object: {shown(data[:80].decode(errors='replace'))}")
    return payload


def shown(text: object) -> str:
    """Return another machine's text in a form that is safe to print: one short line."""
    return visible(str(text)[:_MOST_SHOWN]).replace("\n", " ")


def error_to_json(error: Exception) -> dict[str, str]:
    """Return an error as its `kind`, `message` and `hint`."""
    kind = next((name for name, error_class in _KINDS.items() if type(error) is error_class), "failed")
    message = error.message if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
    return {"error": kind, "message": message, "hint": error.hint if isinstance(error, ForgeError) else ""}


def error_from_json(payload: Mapping[str, Any]) -> Exception:
    """Return the error that a message holds."""
    message, hint = shown(payload.get("message", "")), shown(payload.get("hint", ""))
    kind = _KINDS.get(str(payload.get("error")))
    return RuntimeError(f"the server failed: {message}") if kind is None else kind(message, hint=hint)


def sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    """Return sampling settings as JSON.

    Raises:
        ConfigError: a setting in `extra` has no JSON form.
    """
    payload = {field.name: getattr(sampling, field.name) for field in fields(sampling)} | {
        "extra": dict(sampling.extra)
    }
    try:
        json.dumps(payload, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a sampling setting cannot be sent to a remote engine: {error}", hint="use plain values in `extra`"
        ) from error
    return payload


def sampling_from_json(payload: object) -> Sampling:
    """Return sampling settings.

    Raises:
        WireError: they are malformed.
    """
    if not isinstance(payload, dict) or not isinstance(payload.get("extra", {}), dict):
        raise WireError("sampling settings are not an object")
    try:
        stops = {
            "stop": tuple(map(str, payload.get("stop", ()))),
            "stop_ids": tuple(map(int, payload.get("stop_ids", ()))),
        }
        return Sampling(**{**payload, **stops})
    except (TypeError, ValueError, ForgeError) as error:
        raise WireError(f"sampling settings are malformed: {error}") from error


def integers(values: object, name: str) -> list[int]:
    """Return a list of 32-bit integers.

    Raises:
        WireError: it is something else.
    """
    # By `type`, as bool is a subclass of int.
    if not isinstance(values, list) or not all(type(value) is int and -(2**31) <= value < 2**31 for value in values):
        raise WireError(f"{name} are not a list of integers")
    return values


def _floats(values: object, name: str) -> list[float]:
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise WireError(f"{name} are not a list of numbers")
    try:
        with np.errstate(over="ignore"):
            # What exceeds float32 becomes infinite, as in arrays; so large an int that float64 cannot hold it is
            # refused.
            return np.array(values, np.float64).astype(np.float32).tolist()  # type: ignore[no-any-return]
    except OverflowError as error:
        raise WireError(f"{name} hold a number that is too large") from error


def chunk_to_json(chunk: Chunk) -> dict[str, Any]:
    """Return a chunk as JSON, without its default values."""
    payload: dict[str, Any] = {
        "token_ids": chunk.token_ids.tolist(),
        "logprobs": chunk.logprobs.tolist(),
        "versions": chunk.versions.tolist(),
        "text": chunk.text,
    }
    names = ("finish", "top", "prompt", "cache", "drafted", "accepted", "verified")
    optional_values = ((name, getattr(chunk, name)) for name in names)
    return payload | {name: value for name, value in optional_values if value}


def chunk_from_json(payload: Mapping[str, Any]) -> Chunk:
    """Return a chunk. Its values may still be impossible for the request.

    Raises:
        WireError: it is malformed, or empty without being the last.
    """
    ids, finish, text = integers(payload.get("token_ids"), "token ids"), payload.get("finish", ""), payload.get("text")
    if finish not in ("", "stop", "length") or not isinstance(text, str):
        raise WireError(f"a chunk has the finish {shown(finish)!r} and a text of type {type(text).__name__}")
    if not (ids or finish):
        raise WireError("a chunk is empty")
    # Left out of the message where they are 0; see `chunk_to_json`.
    counts = [_integer(payload.get(name, 0)) for name in ("drafted", "accepted", "verified")]
    try:
        return Chunk(
            token_ids=ids,
            logprobs=_floats(payload.get("logprobs"), "logprobs"),
            versions=integers(payload.get("versions"), "versions"),
            text=text,
            finish=finish,
            top=tuple(
                tuple((_integer(token), _float(value)) for token, value in alternatives)
                for alternatives in payload.get("top", ())
            ),
            prompt=tuple(
                tuple((_integer(token), _float(value), _integer(rank)) for token, value, rank in alternatives)
                for alternatives in payload.get("prompt", ())
            ),
            cache=_cache(payload["cache"]) if "cache" in payload else None,
            drafted=counts[0],
            accepted=counts[1],
            verified=counts[2],
        )
    except (TypeError, ValueError) as error:
        raise WireError(f"a chunk is malformed: {shown(error)}") from error


def _integer(value: object) -> int:
    return integers([value], "entries")[0]


def _float(value: object) -> float:
    return _floats([value], "entries")[0]


def _cache(values: object) -> CacheUse:
    usage, *counts = _floats(values, "the cache's numbers")
    if len(counts) not in (3, 6, 7) or not all(math.isfinite(count) for count in counts):
        raise WireError("the use of a cache is malformed")
    return CacheUse(usage, *map(int, counts))


def scores_to_json(scores: ScoredTokens) -> dict[str, Any]:
    """Return scores as JSON, with matrices flattened."""
    return {name: getattr(scores, name).ravel().tolist() for name in ("logprobs", "top_ids", "top_logprobs")}


def scores_from_json(payload: Mapping[str, Any], count: int, top_k: int) -> ScoredTokens:
    """Return the scores of `count` tokens, with the `top_k` most likely of each.

    Raises:
        WireError: they are malformed, or of other numbers.
    """
    try:
        return ScoredTokens(
            logprobs=_floats(payload.get("logprobs"), "logprobs"),
            top_ids=np.array(integers(payload.get("top_ids"), "token ids"), np.int32).reshape(count, top_k),
            top_logprobs=np.array(_floats(payload.get("top_logprobs"), "logprobs"), np.float32).reshape(count, top_k),
        )
    except ValueError as error:
        raise WireError(f"scores are malformed: {shown(error)}") from error


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """Return a version and its tensors as JSON, without their places in buckets."""
    tensors = [
        [entry.name, list(entry.shape), entry.dtype, entry.fingerprint, entry.adapter_scale, entry.merged]
        for entry in manifest.tensors
    ]
    return {"version": manifest.version, "tensors": tensors}


def manifest_from_json(payload: Mapping[str, Any]) -> Manifest:
    """Return a version and its tensors, which belong to no bucket yet.

    Raises:
        WireError: it is malformed.
    """
    entries = []
    try:
        for name, shape, dtype, fingerprint, *adapter in payload["tensors"]:
            if not isinstance(name, str) or dtype not in _DTYPES or type(fingerprint) is not int:
                raise WireError(f"a tensor {shown(name)!r} is malformed")
            scale, merged = adapter or (None, None)
            if (scale, merged) != (None, None) and (type(scale) not in (int, float) or type(merged) is not int):
                raise WireError(f"the adapter of a tensor {shown(name)!r} is malformed")
            # Sizes are multiplied and allocated by, so that none may be negative.
            sizes = tuple(integers(shape, "sizes"))
            if min(sizes, default=0) < 0:
                raise WireError(f"a tensor {shown(name)!r} has a negative size")
            entries.append(
                TensorEntry(
                    name=name,
                    shape=sizes,
                    dtype=dtype,
                    bucket="",
                    offset=0,
                    fingerprint=fingerprint,
                    adapter_scale=scale,
                    merged=merged,
                )
            )
        # Buckets are formed as the frames name their tensors.
        return Manifest(version=_integer(payload["version"]), tensors=tuple(entries), buckets=())
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a version is malformed: {shown(error)}") from error


def places(entries: Sequence[TensorEntry]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a bucket on the wire, and the bucket's size in bytes."""
    offsets, size = [], 0
    for entry in entries:
        offsets.append(size)
        size += -(-entry.bytes // ALIGN) * ALIGN
    return offsets, size


def report_to_json(report: LoadReport) -> dict[str, Any]:
    """Return the report of a load as JSON."""
    return asdict(report)


def report_from_json(payload: Mapping[str, Any]) -> LoadReport:
    """Return the report of a load.

    Raises:
        WireError: it is malformed.
    """
    fingerprints, seconds = payload.get("fingerprints"), payload.get("seconds")
    if not isinstance(fingerprints, dict) or not all(type(fingerprint) is int for fingerprint in fingerprints.values()):
        raise WireError("the fingerprints of a load are malformed")
    if not isinstance(seconds, dict):
        raise WireError("the seconds of a load are malformed")
    # Only known stages; a missing one took no time.
    phase_seconds = dict(zip(("wait", "pause", "load", "finish", "fingerprint"), [0.0] * 5, strict=True))
    for name in phase_seconds:
        phase_seconds[name] = _float(seconds.get(name, 0.0))
    bytes_read, quantized_bytes = payload.get("bytes_read"), payload.get("quantized_bytes", 0)
    # Sizes of any length: a model's exceed 32 bits.
    if not isinstance(bytes_read, list) or not all(type(size) is int for size in [*bytes_read, quantized_bytes]):
        raise WireError("the bytes of a load are malformed")
    return LoadReport(
        version=_integer(payload.get("version")),
        fingerprints=fingerprints,
        in_place=_integer(payload.get("in_place")),
        bytes_read=tuple(bytes_read),
        quantized_bytes=quantized_bytes,
        seconds=phase_seconds,
    )
