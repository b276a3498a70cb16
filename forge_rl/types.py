"""Data that flows through a run, all of it frozen.

Shape legend, used in every docstring and as dim names:
    P  groups in a batch (one task each)
    G  episodes in a group
    T  tokens of an episode
    R  rows of a packed batch
    L  tokens in a row
    V  vocabulary
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Message = Mapping[str, object]
"""One chat message: {"role": "system" | "user" | "assistant" | "tool", "content": text}, and what chat templates take
beside these, such as "tool_calls"."""

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32]
"""Token ids as an argument."""

Advantages: TypeAlias = "torch.Tensor | Sequence[Sequence[npt.NDArray[np.float32]]]"
"""One advantage for each episode of a batch, [P, G] float32; or [P][G] arrays with one for each token that the
episode's model wrote, turn after turn."""

D = TypeVar("D", bound=np.generic)


class TokenArray(Generic[D]):
    """Field of a frozen dataclass that holds an array, whatever sequence the constructor is given.

    Four bytes a token, where a tuple of Python's numbers takes ten times as many. An array of the right kind is kept as
    it is: nobody may write into it.
    """

    def __init__(self, dtype: type[D]) -> None:
        self._dtype = np.dtype(dtype)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    if TYPE_CHECKING:  # without it attributes are looked up in the instance at once

        def __get__(self, instance: object, owner: type | None = None) -> npt.NDArray[D]: ...

    def __set__(self, instance: object, values: Sequence[int] | Sequence[float] | npt.NDArray[Any]) -> None:
        if cast(object, values) is self:  # what a dataclass takes for the default
            raise TypeError(f"{type(instance).__name__} needs the argument {self._name}")
        if type(values) is not np.ndarray or values.dtype is not self._dtype:
            values = np.array(values, self._dtype)
            values.flags.writeable = False
        instance.__dict__[self._name] = values


class _ByValue:
    """Compares dataclasses that hold arrays by their values; NaN equals NaN."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, each.name), getattr(other, each.name)) for each in fields(self))

    __hash__ = None  # type: ignore[assignment]


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) != isinstance(b, np.ndarray):
        return False
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return bool(a == b)


class Outcome(enum.StrEnum):
    """End of an episode: whether it may be trained on, and whose fault an error was."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """The last completion was cut by a token limit, or the context had no room for another. Scored."""
    MODEL_ERROR = "model_error"
    """The model broke the environment's protocol, as its Step said. Scored."""
    ENVIRONMENT_ERROR = "environment_error"
    """The environment raised. Not scored."""
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    """A replica died or hung and the work could not be saved, or a deadline passed. Not scored."""
    JUDGE_ERROR = "judge_error"
    """The reward raised, or was no finite number. Not scored."""

    @property
    def scored(self) -> bool:
        """True if the episode says something about the policy; others never enter a group."""
        return self in (Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.MODEL_ERROR)

    @property
    def hint(self) -> str:
        """Advice to a user whose episodes fail so; "" for those that do not fail."""
        return {
            Outcome.ENVIRONMENT_ERROR: "mend the environment or the agent, which raised this",
            Outcome.JUDGE_ERROR: "mend the reward function, which raised this; a live run takes another one with "
            "`await run.reward.replace(function)`, and a stopped one with --out FOLDER and another --reward, or, once "
            "its file is edited, --force-continue",
            Outcome.INFRASTRUCTURE_ERROR: "look at the faults in events.jsonl and at logs/ in the run folder",
        }.get(self, "")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem: the messages that the model is shown, and the truth that its answer is verified by.

    Task(id="sum/1", source="sum", messages=({"role": "user", "content": "2+3?"},), truth={"answer": "5"})
    """

    id: str
    """Unique within its source and the same in every run."""
    source: str
    """Name of the source that it came from."""
    messages: tuple[Message, ...]
    """Conversation that the model continues."""
    truth: Mapping[str, object] = field(default_factory=dict)
    """Data for the verifier; never shown to the model. Must pickle."""
    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas of the tools that the model is shown, as chat templates take them."""
    verifier: str = ""
    """Name of the verifier that the task's source brings along, such as "reasoning_gym"; "" if it brings none. Set by
    code alone: nothing that a file's row holds gets here."""

    @property
    def prompt(self) -> str:
        """Text of the last message."""
        return str(self.messages[-1]["content"])


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One tool call in a completion."""

    id: str
    name: str
    arguments: str
    """Text of the arguments as the model wrote them; JSON if it did well."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn(_ByValue):
    """One completion with its prompt. All ids are the engine's own; text is never tokenised again.

    Turn(prompt_ids=(1, 17, 4), token_ids=(9, 2), logprobs=(-0.7, -0.1), versions=(3, 3), text="5")
    """

    prompt_ids: TokenArray[np.int32] = TokenArray(np.int32)
    """Every token that the model saw before this completion."""
    token_ids: TokenArray[np.int32] = TokenArray(np.int32)
    """Tokens of the completion, with the end-of-sequence token when the model produced one."""
    logprobs: TokenArray[np.float32] = TokenArray(np.float32)
    """Behaviour log-probability of each completion token, from the engine, under the distribution it sampled from."""
    versions: TokenArray[np.int32] = TokenArray(np.int32)
    """Version of the weights that produced each completion token."""
    text: str
    """The completion, decoded, without special tokens."""
    truncated: bool = False
    """True if the completion was cut by a token limit."""
    routed: npt.NDArray[Any] | None = None
    """Experts that the engine routed each token of the context to, `[tokens - 1, layers, top_k] uint8 or uint16`: the
    last token was drawn, and not computed. None where nobody asked."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.versions)}
        assert len(lengths) == 1, f"ids, logprobs and versions of a turn differ in length: {lengths}"

    @classmethod
    def of_arrays(cls, **fields: Any) -> Turn:
        """Make a turn from all its fields, whose arrays are of the right kind and length: a quarter of the time."""
        turn = object.__new__(cls)
        turn.__dict__.update(fields)
        return turn

    @property
    def context(self) -> npt.NDArray[np.int32]:
        """Prompt and completion: what the prompt of the next turn begins with."""
        return np.concatenate([self.prompt_ids, self.token_ids])


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk(_ByValue):
    """A piece of a completion as it is decoded. Token fields are aligned, as in Turn."""

    token_ids: TokenArray[np.int32] = TokenArray(np.int32)
    logprobs: TokenArray[np.float32] = TokenArray(np.float32)
    """Log-probabilities as in Turn; NaN in greedy decoding."""
    versions: TokenArray[np.int32] = TokenArray(np.int32)
    text: str
    """Text that these tokens add; may lag behind them where a character is not complete."""
    finish: Literal["", "stop", "length"] = ""
    """Reason why the completion ends with this chunk; "" while it goes on."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The likeliest (id, logprob) pairs at each token, if Sampling.top_logprobs asked for them."""
    routed: npt.NDArray[Any] | None = None
    """Experts as in Turn, of the prompt's tokens too; with the last chunk, if the engine was asked for them."""
    prompt: tuple[tuple[tuple[int, float, int], ...], ...] = ()
    """(id, logprob, rank) of each token of the prompt and of its likeliest alternatives; none for the first token. With
    the first chunk, if the request's "prompt_logprobs" asked for them."""

    def __reduce__(self) -> tuple[object, ...]:
        # A third of the time that pickling three arrays takes: there is a chunk for each token of a stream.
        arrays = (self.token_ids.tobytes(), self.logprobs.tobytes(), self.versions.tobytes())
        return _read_chunk, (*arrays, self.text, self.finish, self.top, self.routed, self.prompt)


def _read_chunk(
    ids: bytes, logprobs: bytes, versions: bytes, text: str, finish: Any, top: Any, routed: Any, prompt: Any
) -> Chunk:
    return Chunk(
        token_ids=np.frombuffer(ids, np.int32),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32),
        text=text,
        finish=finish,
        top=top,
        routed=routed,
        prompt=prompt,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment(_ByValue):
    """One training sequence: a longest run of turns in which each prompt extends what came before.

    All fields have length T. Entry t describes token t itself (not t+1); logprobs are 0, versions and turns -1 where
    trained is False.
    """

    token_ids: TokenArray[np.int32] = TokenArray(np.int32)
    trained: TokenArray[np.bool_] = TokenArray(np.bool_)
    logprobs: TokenArray[np.float32] = TokenArray(np.float32)
    versions: TokenArray[np.int32] = TokenArray(np.int32)
    turns: TokenArray[np.int32] = TokenArray(np.int32)
    """Index of the token's turn within its episode."""
    routed: npt.NDArray[Any] | None = None
    """Experts that engines routed each token to, `[T, layers, top_k] uint8 or uint16`; those of the last token, which
    was not computed, are those of the one before. None where they are not known."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Reward of an episode: a total, and what it is made of.

    Score(total=0.9, parts={"correct": 1.0, "length": -0.1}, answer="42")
    Score(total=1.0, turns=(0.0, 0.5, 1.0))  # for an episode of three turns
    """

    total: float
    """Reward of the whole episode: advantages are taken of it."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts, each a metric."""
    turns: Sequence[float] = ()
    """A value for each turn, which its tokens alone are credited with, beside the total; () for none."""
    tokens: Sequence[Sequence[float] | npt.NDArray[Any]] = ()
    """A value for each token of each turn, beside the total; NaN where a token has none; () for none."""
    answer: str = ""
    """Answer that was found in the episode: what a majority of episodes is taken of."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """All turns of one attempt at one task, scored.

    episode = Episode(task=task, turns=(first, second), reward=1.0)
    episode.text, episode.response_tokens
    """

    task: Task
    turns: tuple[Turn, ...]
    """Turns; a prompt that repeats the turns before it is a view of the same memory."""
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward by name."""
    turn_values: tuple[float, ...] = ()
    """Value of each turn beside the reward; () where the reward gave none."""
    token_values: tuple[npt.NDArray[np.float32], ...] = field(default=(), compare=False)
    """Values of tokens beside the reward: an array for each turn, NaN where a token has none; () for none."""
    answer: str = ""
    """Answer that the reward found in the episode, if it said so."""
    output: str | None = None
    """Text that an agent gave as its result; None where the last completion is."""
    outcome: Outcome = Outcome.COMPLETED
    problem: str = ""
    """Cause of the error, where the outcome is one; what failed at first, where the score was tried again."""
    seconds: float = 0.0
    """Wall time from the first request to the score."""
    _runs: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """Indices of the turns of each segment."""

    def __post_init__(self) -> None:
        turns, runs = self.turns, list[list[int]]()
        for place, turn in enumerate(turns):
            longest: list[int] | None = None
            for run in runs:
                last = turns[run[-1]]
                if _continues(turn, last) and (longest is None or _length(last) > _length(turns[longest[-1]])):
                    longest = run
            if longest is None:
                runs.append([place])
            else:
                longest.append(place)
        for run in runs:
            if len(run) > 1:
                _share_prompts([turns[place] for place in run])
        self.__dict__["_runs"] = tuple(map(tuple, runs))  # of which the garbage collector looks at none

    def __reduce__(self) -> tuple[object, ...]:
        # Prompts repeat what came before them: the ids of a run of turns are sent once.
        last = {place: run[-1] for run in self._runs for place in run}
        sent = tuple(
            turn if place == last[place] else (last[place], len(turn.prompt_ids), _without_ids(turn))
            for place, turn in enumerate(self.turns)
        )
        rest = {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.name != "turns"}
        return _read_episode, (sent, rest)

    def updated(self, **fields: Any) -> Episode:
        """Return the episode with other values of some fields, but the same turns: those are not compared again."""
        episode = object.__new__(Episode)
        episode.__dict__.update(self.__dict__, **fields)
        return episode

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Turns joined by longest exact token prefix; a rewritten history starts a new segment of the same reward.

        They are made anew for each caller: most episodes are asked for them once.
        """
        return tuple(_join(self.turns, run) for run in self._runs)

    @property
    def response_tokens(self) -> int:
        """Number of tokens that the model produced, over all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def text(self) -> str:
        """Text that rewards score: what an agent gave as its result, or else the last completion."""
        if self.output is not None:
            return self.output
        return self.turns[-1].text if self.turns else ""


def _without_ids(turn: Turn) -> dict[str, object]:
    return {name: value for name, value in turn.__dict__.items() if name not in ("prompt_ids", "token_ids")}


def _read_episode(sent: Sequence[Any], rest: Mapping[str, Any]) -> Episode:
    contexts = {place: turn.context for place, turn in enumerate(sent) if isinstance(turn, Turn)}
    turns = []
    for turn in sent:
        if not isinstance(turn, Turn):
            last, begin, values = turn
            end = begin + len(values["logprobs"])
            turn = Turn.of_arrays(prompt_ids=contexts[last][:begin], token_ids=contexts[last][begin:end], **values)
        turns.append(turn)
    return Episode(turns=tuple(turns), **rest)


def _length(turn: Turn) -> int:
    return len(turn.prompt_ids) + len(turn.token_ids)


def _continues(turn: Turn, last: Turn) -> bool:
    """Tell whether a turn's prompt begins with everything up to the end of another turn."""
    shown, prompt, end = turn.prompt_ids, len(last.prompt_ids), _length(last)
    return (
        len(shown) >= end
        and shown[prompt:end].tobytes() == last.token_ids.tobytes()
        and shown[:prompt].tobytes() == last.prompt_ids.tobytes()
    )


def _share_prompts(run: Sequence[Turn]) -> None:
    """Make the ids of a run's turns views of the last one's context, which repeats all the others: equal values."""
    ids = run[-1].context
    ids.flags.writeable = False
    for turn in run:
        begin, end = len(turn.prompt_ids), _length(turn)
        turn.__dict__["prompt_ids"], turn.__dict__["token_ids"] = ids[:begin], ids[begin:end]


def _join(turns: Sequence[Turn], run: Sequence[int]) -> Segment:
    """Make the segment of a run of turns."""
    ids = turns[run[-1]].context
    trained, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
    versions, indices = np.full((2, len(ids)), -1, np.int32)
    for place in run:
        turn = turns[place]
        here = slice(len(turn.prompt_ids), _length(turn))
        trained[here], logprobs[here], versions[here], indices[here] = True, turn.logprobs, turn.versions, place
    routed = _join_routed([turns[place].routed for place in run], len(ids))
    return Segment(token_ids=ids, trained=trained, logprobs=logprobs, versions=versions, turns=indices, routed=routed)


def _join_routed(turns: Sequence[npt.NDArray[Any] | None], tokens: int) -> npt.NDArray[Any] | None:
    """Return the experts of a segment's tokens, each as it was computed first; None if some are not known."""
    parts, known = list[npt.NDArray[Any]](), 0
    for routed in turns:
        if routed is not None and len(routed) > known:
            parts.append(routed[known:])
            known = len(routed)
    return np.concatenate([*parts, parts[-1][-1:]]) if 0 < known == tokens - 1 else None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The G episodes of one task.

    Group(task=task, episodes=(wrong, right)).rewards  # (0.0, 1.0)
    """

    task: Task
    episodes: tuple[Episode, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(episode.reward for episode in self.episodes)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The P groups that are trained together, all of the same size G.

    batch = await run.rollouts.next_batch()
    advantages = group_advantages(batch.rewards)  # [P, G]
    """

    groups: tuple[Group, ...]
    version: int
    """Latest published version when the batch was delivered; a token's lag is this minus its own."""

    @property
    def episodes(self) -> tuple[Episode, ...]:
        return tuple(episode for group in self.groups for episode in group.episodes)

    @property
    def rewards(self) -> torch.Tensor:
        """Reward of each episode, [P, G] float32."""
        import torch

        return torch.tensor([group.rewards for group in self.groups], dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings by which a completion is sampled.

        Sampling(max_tokens=256, temperature=0.8, stop=("</answer>",))

    Top-p, top-k and penalties are in `extra` on purpose: they make the behaviour logprobs those of another distribution
    than the one that is trained.
    """

    max_tokens: int
    """Maximum tokens of a completion."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    seed: int | None = None
    """Seed of this completion alone; None draws from the engine's own stream."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion; left out of its text, but their tokens are kept."""
    top_logprobs: int = 0
    """Number of likeliest alternatives to report for each token."""
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Settings of the engine's own, by its names: `{"top_p": 0.9, "structured_outputs": {"json": schema}}`. Once a
    completion that has some has begun, it is not resumed on another engine."""
