"""Arrays of tokens: a completion's chunks, training sequences, and the compact classes that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, make_dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32]
"""Token ids as an argument."""

MOST_TOP = 1024
"""Maximum number of most likely tokens that engines return for each token."""

D = TypeVar("D", bound=np.generic)


class TokenArray(Generic[D]):
    """Field of a `ValueRecord` dataclass that stores any sequence as a read-only array.

    Four bytes per token, a tenth of a tuple of Python numbers. Of an array of the right dtype, it is a view.
    """

    def __init__(self, dtype: type[D]) -> None:
        self.dtype = np.dtype(dtype)

    if TYPE_CHECKING:  # the array itself is in the instance's slot

        def __get__(self, instance: object, owner: type | None = None) -> npt.NDArray[D]: ...

        def __set__(self, instance: object, values: Sequence[int] | Sequence[float] | npt.NDArray[Any]) -> None: ...


def read_only(array: npt.NDArray[D]) -> npt.NDArray[D]:
    """Return the array itself if it is read-only, else a read-only view."""
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


class _RecordLayout:
    """How the objects of a frozen dataclass with slots are read and made at once."""

    def __init__(self, kind: type) -> None:
        members = fields(kind)
        self._kind = kind
        # An object of a class with these slots that is not frozen is filled sooner, and then becomes one of this class.
        self._mutable: Any = make_dataclass(
            f"Mutable{kind.__name__}",
            [member.name for member in members],
            bases=kind.__bases__,
            namespace={"__post_init__": lambda _: None},
            slots=True,
        )
        self.values: Callable[[object], tuple[Any, ...]] = attrgetter(*(member.name for member in members))
        """Gets all fields."""
        self.defaults = {member.name: member.default for member in members}
        self.arrays = {
            name: default.dtype for name, default in self.defaults.items() if isinstance(default, TokenArray)
        }
        """The dtype of each field that is a TokenArray."""

    def make(self, values: Iterable[object]) -> Any:
        """Make an object of all its fields, without conversions and checks."""
        instance = self._mutable(*values)
        instance.__class__ = self._kind
        return instance


class _Layouts(dict[type, _RecordLayout]):
    """Layouts by class, made when they are first used."""

    def __missing__(self, kind: type) -> _RecordLayout:
        self[kind] = _RecordLayout(kind)
        return self[kind]


_LAYOUTS = _Layouts()


class CompactRecord:
    """Base of frozen dataclasses with `slots=True`, of which thousands are in flight.

    Without a dict, each is one object for the garbage collector; pickled, they are a tuple of their fields.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def unchecked(cls, **values: Any) -> Self:
        """Make one from fields that need no conversion, without checks, which is several times faster."""
        layout = _LAYOUTS[cls]
        instance: Self = layout.make({**layout.defaults, **values}.values())
        return instance

    def updated(self, **values: Any) -> Self:
        """Return a copy with some fields changed, without conversions and checks."""
        layout = _LAYOUTS[type(self)]
        instance: Self = layout.make(layout.values(self))
        for name, value in values.items():
            _set(instance, name, value)
        return instance

    def complete(self, **values: Any) -> None:
        """Set fields of an object that nobody else has yet."""
        for name, value in values.items():
            _set(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return from_values, (type(self), *_LAYOUTS[type(self)].values(self))


_set = object.__setattr__

C = TypeVar("C", bound=CompactRecord)


def from_values(kind: type[C], *values: object) -> C:
    """Return the object that was pickled as these values."""
    instance: C = _LAYOUTS[kind].make(values)
    return instance


class ValueRecord(CompactRecord):
    """Has array fields, and compares by value; NaN equals NaN. Fields with `compare=False` are left out."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, dtype in _LAYOUTS[type(self)].arrays.items():
            values = getattr(self, name)
            if type(values) is not np.ndarray or values.dtype is not dtype:
                if isinstance(values, TokenArray):  # the default
                    raise TypeError(f"{type(self).__name__} needs the argument {name}")
                values = np.array(values, dtype)
            _set(self, name, read_only(values))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        names = (member.name for member in fields(self) if member.compare)
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

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
    prompt_tokens: int = 0
    """Tokens of the prompts of requests that started."""
    cached_tokens: int = 0
    """Those of `prompt_tokens` whose keys and values were in the cache."""
    prefilled_again: int = 0
    """Tokens computed again of requests that had lost their keys and values: to others, or as weights were loaded."""
    transferred_tokens: int = 0
    """Tokens whose keys and values a connector brought back, see `DecodeSettings.kv_transfer_config`."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Chunk(ValueRecord):
    """Part of a completion that is being decoded. Token fields are aligned, as in Turn."""

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
    return Chunk.unchecked(
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


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ScoredTokens(ValueRecord):
    """A model's logprobs of given tokens, and its most likely tokens at each of them. All fields are aligned."""

    logprobs: TokenArray[np.float32] = TokenArray(np.float32)
    """[T], logprob of each token, given all tokens before it."""
    top_ids: TokenArray[np.int32] = TokenArray(np.int32)
    """[T, k], the most likely tokens in its place, most likely first."""
    top_logprobs: TokenArray[np.float32] = TokenArray(np.float32)
    """[T, k], their logprobs."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Segment(ValueRecord):
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
