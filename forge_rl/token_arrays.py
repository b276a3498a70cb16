"""Arrays of tokens: a completion's chunks, training sequences, and the read-only fields that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32]
"""Token ids as an argument."""

MOST_TOP = 1024
"""Maximum number of most likely tokens that engines return for each token."""

D = TypeVar("D", bound=np.generic)


class TokenArray(Generic[D]):
    """Field of a frozen dataclass that stores any sequence as a read-only array.

    Four bytes per token, a tenth of a tuple of Python numbers. Of an array of the right dtype, it is a view.
    """

    def __init__(self, dtype: type[D]) -> None:
        self._dtype = np.dtype(dtype)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    if TYPE_CHECKING:  # without __get__, lookups go directly to the instance, which is faster

        def __get__(self, instance: object, owner: type | None = None) -> npt.NDArray[D]: ...

    def __set__(self, instance: object, values: Sequence[int] | Sequence[float] | npt.NDArray[Any]) -> None:
        if cast(object, values) is self:  # dataclasses pass it as the default
            raise TypeError(f"{type(instance).__name__} needs the argument {self._name}")
        if type(values) is not np.ndarray or values.dtype is not self._dtype:
            values = np.array(values, self._dtype)
        instance.__dict__[self._name] = read_only(values)


def read_only(array: npt.NDArray[D]) -> npt.NDArray[D]:
    """Return the array itself if it is read-only, else a read-only view."""
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


class ByValue:
    """Compares dataclasses with array fields by value; NaN equals NaN. Fields with `compare=False` are left out."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        compared = (each.name for each in fields(self) if each.compare)
        return all(_same(getattr(self, name), getattr(other, name)) for name in compared)

    __hash__ = None  # type: ignore[assignment]


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) != isinstance(b, np.ndarray):
        return False
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return bool(a == b)


FULL = 0.9
"""Share of a KV cache in use above which it counts as full."""


class CacheUse(NamedTuple):
    """An engine's report about its KV cache, since the last one."""

    usage: float
    """Highest share of the cache in use."""
    preemptions: int
    """How often requests that ended now had lost their keys and values to others."""
    waiting: int
    """Most requests that waited inside the engine at once."""
    fitting: int
    """Number of requests that ran while others waited and the cache was full; 0 if it never was."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk(ByValue):
    """Part of a completion, as it is decoded. Token fields are aligned, as in Turn."""

    token_ids: TokenArray[np.int32] = TokenArray(np.int32)
    logprobs: TokenArray[np.float32] = TokenArray(np.float32)
    """Logprobs as in Turn; NaN in greedy decoding."""
    versions: TokenArray[np.int32] = TokenArray(np.int32)
    text: str
    """Text that these tokens add; may lag behind them if a character is incomplete."""
    finish: Literal["", "stop", "length"] = ""
    """Finish reason if the completion ends with this chunk, else ""."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Most likely (id, logprob) pairs at each token, if requested by Sampling.top_logprobs."""
    routed: npt.NDArray[Any] | None = None
    """Experts as in Turn, including the prompt's tokens; in the last chunk, if requested."""
    prompt: tuple[tuple[tuple[int, float, int], ...], ...] = ()
    """(id, logprob, rank) of each prompt token and its most likely alternatives, empty for the first token; in the
    first chunk, if requested by "prompt_logprobs"."""
    cache: CacheUse | None = None
    """Use of the engine's KV cache since its last report: in the last chunk, and once requests wait for room in it."""
    drafted: int = 0
    """Tokens that were drafted for the completion by speculation; in the last chunk."""
    accepted: int = 0
    """How many of them were accepted; in the last chunk."""
    verified: int = 0
    """Steps that verified a draft for the completion; in the last chunk."""

    def __reduce__(self) -> tuple[object, ...]:
        # Takes a third of the time of pickling three arrays; a stream has a chunk per token.
        arrays = (self.token_ids.tobytes(), self.logprobs.tobytes(), self.versions.tobytes())
        counts = (self.cache, self.drafted, self.accepted, self.verified)
        return _read_chunk, (*arrays, self.text, self.finish, self.top, self.routed, self.prompt, *counts)


def _read_chunk(ids: bytes, logprobs: bytes, versions: bytes, *rest: Any) -> Chunk:
    text, finish, top, routed, prompt, cache, drafted, accepted, verified = rest
    return Chunk(
        token_ids=np.frombuffer(ids, np.int32),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32),
        text=text,
        finish=finish,
        top=top,
        routed=routed,
        prompt=prompt,
        cache=cache,
        drafted=drafted,
        accepted=accepted,
        verified=verified,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredTokens(ByValue):
    """A model's logprobs of given tokens, and its most likely tokens at each of them. All fields are aligned."""

    logprobs: TokenArray[np.float32] = TokenArray(np.float32)
    """[T], logprob of each token, given all tokens before it."""
    top_ids: TokenArray[np.int32] = TokenArray(np.int32)
    """[T, k], the most likely tokens in its place, most likely first."""
    top_logprobs: TokenArray[np.float32] = TokenArray(np.float32)
    """[T, k], their logprobs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment(ByValue):
    """One training sequence: a maximal run of turns in which each prompt extends the previous context.

    All fields have length T. Entry t describes token t itself (not t+1); where trained is False, logprobs are 0 and
    versions and turns are -1.
    """

    token_ids: TokenArray[np.int32] = TokenArray(np.int32)
    trained: TokenArray[np.bool_] = TokenArray(np.bool_)
    logprobs: TokenArray[np.float32] = TokenArray(np.float32)
    versions: TokenArray[np.int32] = TokenArray(np.int32)
    turns: TokenArray[np.int32] = TokenArray(np.int32)
    """Index of the token's turn within its episode."""
    routed: npt.NDArray[Any] | None = None
    """Experts to which engines routed each token, `[T, layers, top_k] uint8 or uint16`; the last token, which was not
    computed, repeats the previous token's. None if unknown."""
