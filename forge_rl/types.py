"""Data types that flow through a run, all frozen.

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
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from forge_rl.errors import ConfigError
from forge_rl.system.terminal import clipped
from forge_rl.token_arrays import CompactRecord, Segment, TokenArray, ValueRecord, from_values

if TYPE_CHECKING:
    import torch

Message = Mapping[str, object]
"""One chat message: {"role": "system" | "user" | "assistant" | "tool", "content": text}, and optionally other keys of
chat templates, such as "tool_calls"."""

Advantages: TypeAlias = "torch.Tensor | Sequence[Sequence[npt.NDArray[np.float32]]]"
"""One advantage per episode of a batch, [P, G] float32; or [P][G] arrays with one per token that the model generated in
the episode, turn after turn."""


class Outcome(enum.StrEnum):
    """How an episode ended: whether it may be trained on, and whose fault an error was."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """A token limit cut the last completion, or the context had no room for another. Scored."""
    MODEL_ERROR = "model_error"
    """The model broke the environment's protocol, as its Step reported. Scored."""
    ENVIRONMENT_ERROR = "environment_error"
    """The environment raised. Not scored."""
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    """A replica or sandbox died or hung and the work was lost, or a deadline expired. Not scored."""
    JUDGE_ERROR = "judge_error"
    """The reward raised, or was not a finite number. Not scored."""

    @property
    def scored(self) -> bool:
        """True if the episode is evidence about the policy; others never enter a group."""
        return self in (Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.MODEL_ERROR)

    @property
    def hint(self) -> str:
        """Advice for a user whose episodes fail like this; "" for outcomes that are not failures."""
        return {
            Outcome.ENVIRONMENT_ERROR: "fix the environment or the agent, which raised this",
            Outcome.JUDGE_ERROR: "fix the reward function, which raised this; replace it in a live run with "
            "`await run.reward.replace(function)`, or in a stopped one with --out FOLDER and another --reward, or, "
            "once its file is edited, --force-continue",
            Outcome.INFRASTRUCTURE_ERROR: "see the faults in events.jsonl and logs/ in the run folder",
        }.get(self, "")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem: the messages for the model, and the truth for verifying its answer.

    Task(id="sum/1", source="sum", messages=({"role": "user", "content": "2+3?"},), truth={"answer": "5"})
    """

    id: str
    """Identifier, unique within the source and the same in every run."""
    source: str
    """Name of the task's source."""
    messages: tuple[Message, ...]
    """Conversation for the model to continue."""
    truth: Mapping[str, object] = field(default_factory=dict)
    """Data for the verifier; never shown to the model. Must pickle."""
    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas of the tools for the model, in the format of chat templates."""
    verifier: str = ""
    """Name of the source's own verifier, such as "reasoning_gym"; "" if it has none. Set only by code, never from the
    rows of a file."""
    prompt_is_text: bool = False
    """True if the prompt was a text in the row, not messages; rewards of TRL then see texts."""

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
    """Arguments as the model wrote them; JSON if the call is well-formed."""
    seconds: float | None = field(default=None, compare=False)
    """Wall time of the call in seconds; None if it was not run here."""
    error: str = ""
    """The tool's answer if it is an error, else ""."""
    cached: bool | None = field(default=None, compare=False)
    """True if the output is a kept result of a pure tool, False if such a tool was run; None otherwise."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Turn(ValueRecord):
    """One completion with its prompt. All ids come from the engine; text is never re-tokenized.

    Turn(prompt_ids=(1, 17, 4), token_ids=(9, 2), logprobs=(-0.7, -0.1), versions=(3, 3), text="5")
    """

    prompt_ids: TokenArray[np.int32] = TokenArray(np.int32)
    """All tokens that the model saw before this completion."""
    token_ids: TokenArray[np.int32] = TokenArray(np.int32)
    """Tokens of the completion, including the end-of-sequence token if the model produced one."""
    logprobs: TokenArray[np.float32] = TokenArray(np.float32)
    """The engine's behaviour logprob of each completion token, under the distribution that it sampled from."""
    versions: TokenArray[np.int32] = TokenArray(np.int32)
    """Version of the weights that produced each completion token; -1 for given tokens, which no model sampled."""
    text: str
    """Decoded completion without special tokens, and without a character that is incomplete at its end."""
    answer: str | None = None
    """`text` without the model's thoughts; None if it has none."""
    truncated: bool = False
    """True if a token limit cut the completion."""
    messages: tuple[Message, ...] = ()
    """Messages that the model was shown before this completion and after the turn that it continues; all messages if it
    starts a segment. A raw prompt has the role "prompt"."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls that were parsed from the completion."""
    agent: str = ""
    """Name of the agent or sub-agent that asked for it, as it gave it to the gateway; "" if it gave none."""
    branch: tuple[int, ...] = ()
    """Node of a tree of episodes: the tree's number in the group, then the branch taken at each fork before this turn.
    Episodes whose worlds forked have the turns before the fork in common. () if worlds of the group do not fork."""
    seconds: float = field(default=0.0, compare=False)
    """Wall time of the completion in seconds, including the wait for an engine."""
    response_s: float = field(default=0.0, compare=False)
    """Wall time of the environment's response to the completion in seconds; 0 if an agent responded."""
    routed: npt.NDArray[Any] | None = None
    """Experts to which the engine routed each token of the context, `[tokens - 1, layers, top_k] uint8 or uint16`: the
    last token was sampled but not computed. None if not requested."""

    def __post_init__(self) -> None:
        ValueRecord.__post_init__(self)
        lengths = {len(self.token_ids), len(self.logprobs), len(self.versions)}
        assert len(lengths) == 1, f"ids, logprobs and versions of a turn differ in length: {lengths}"

    @classmethod
    def given(cls, prompt_ids: Sequence[int], token_ids: Sequence[int], text: str) -> Turn:
        """Make a turn that no model sampled, such as a demonstration: its logprobs are 0 and its versions -1.

        Turn.given([1, 17, 4], [9, 2], "5")
        """
        count = len(token_ids)
        return cls(
            prompt_ids=prompt_ids, token_ids=token_ids, logprobs=(0.0,) * count, versions=(-1,) * count, text=text
        )

    @property
    def content(self) -> str:
        """What the completion says after its thoughts: what environments and rewards see."""
        return self.text if self.answer is None else self.answer

    @property
    def context(self) -> npt.NDArray[np.int32]:
        """Prompt and completion, the prefix of the next turn's prompt."""
        ids = np.concatenate([self.prompt_ids, self.token_ids])
        ids.setflags(write=False)
        return ids

    def __repr__(self) -> str:
        cut = ", truncated" if self.truncated else ""
        title = f"Turn  {len(self.prompt_ids)} + {len(self.token_ids)} tokens{cut}, {self.seconds:.2f} s"
        return _on_a_screen([title, *_lines_of(self, lines=4)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Score(CompactRecord):
    """Reward of an episode: a total and its parts.

    Score(total=0.9, parts={"correct": 1.0, "length": -0.1}, answer="42")
    Score(total=1.0, turns=(0.0, 0.5, 1.0))  # for an episode of three turns
    """

    total: float
    """Reward of the whole episode, from which advantages are computed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts, each a metric."""
    turns: Sequence[float] = ()
    """A value per turn, credited only to its tokens, in addition to the total; () for none."""
    turns_in_total: bool = False
    """True if the total includes the sum of `turns`, which are rewards of an environment's steps. Returns that add up
    rewards then count each once."""
    tokens: Sequence[Sequence[float] | npt.NDArray[Any]] = field(default=(), compare=False)
    """A value per token of each turn, in addition to the total; NaN for a token without one; () for none."""
    answer: str = ""
    """Answer extracted from the episode, for majority votes."""
    feedback: str = ""
    """Comment on the episode, such as the output of a failed test; shown to teachers whose hint is feedback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode(CompactRecord):
    """All turns of one attempt at one task, and their score.

    episode = Episode(task=task, turns=(first, second), score=Score(total=1.0))
    episode.text, episode.reward
    """

    task: Task
    turns: tuple[Turn, ...]
    """Turns; a prompt that repeats previous turns is a view of the same memory."""
    score: Score | None = None
    """Score; None if the episode failed or is `unscored`."""
    output: str | None = None
    """Result text of an agent; None if the last completion is the result."""
    outcome: Outcome = Outcome.COMPLETED
    problem: str = ""
    """Cause of the error if the outcome is one; the first failure if scoring was retried."""
    seconds: float = 0.0
    """Wall time in seconds from the first request to the score."""
    began: float = field(default=0.0, compare=False)
    """Unix time at which it began; 0 if unknown."""
    _runs: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """Indices of the turns of each segment; `updated` does not compute them again."""

    def __post_init__(self) -> None:
        turns, runs = list(self.turns), list[list[int]]()
        for place, turn in enumerate(turns):
            longest: list[int] | None = None
            for run in runs:
                last_turn = turns[run[-1]]
                if _continues(turn, last_turn) and (
                    longest is None or _length(last_turn) > _length(turns[longest[-1]])
                ):
                    longest = run
            if longest is None:
                runs.append([place])
            else:
                longest.append(place)
        for run in runs:
            if len(run) > 1:
                context = turns[run[-1]].context
                for place in run:
                    turns[place] = _with_ids(context, len(turns[place].prompt_ids), turns[place])
        # Tuples of ints are untracked by the garbage collector.
        self.complete(turns=tuple(turns), _runs=tuple(map(tuple, runs)))

    def __reduce__(self) -> tuple[object, ...]:
        # Prompts repeat the previous context, so the ids of a run of turns are sent once.
        turns: list[Any] = list(self.turns)
        for *earlier, _ in self._runs:
            for place in earlier:
                turns[place] = len(turns[place].prompt_ids), turns[place].updated(prompt_ids=None, token_ids=None)
        return _read_episode, CompactRecord.__reduce__(self.updated(turns=turns))[1]

    @property
    def reward(self) -> float:
        """Total of the score; 0 without one."""
        return 0.0 if self.score is None else self.score.total

    @property
    def unscored(self) -> bool:
        """True as long as it waits to be scored with its group."""
        return self.score is None and self.outcome.scored

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the turns of each segment."""
        return self._runs

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Turns joined by longest exact token prefix; a rewritten history starts a new segment with the same reward.

        Rebuilt on each access, as most episodes need them once.
        """
        return tuple(_join(self.turns, run) for run in self._runs)

    def observation(self, turn: int) -> npt.NDArray[np.int32]:
        """Return the tokens that the model was shown before a turn, and after the turn that it continues: a part of the
        turn's prompt, or all of it if the turn starts a segment."""
        prompt_ids = self.turns[turn].prompt_ids
        run = next(run for run in self._runs if turn in run)
        place = run.index(turn)
        return prompt_ids[_length(self.turns[run[place - 1]]) :] if place else prompt_ids

    @property
    def response_tokens(self) -> int:
        """Number of tokens that the model generated, over all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def text(self) -> str:
        """Text that rewards score: an agent's result, or else the last completion without its thoughts, "" if these are
        unfinished."""
        if self.output is not None:
            return self.output
        return self.turns[-1].content if self.turns else ""

    @property
    def whole_text(self) -> str:
        """`text` with the thoughts before it, for rewards that grade these too."""
        return self.turns[-1].text if self.output is None and self.turns else self.text

    def __repr__(self) -> str:
        num_turns, first_turns = len(self.turns), self.turns[:_MOST_TURNS]
        lines = [f"Episode  {_summary(self)}, {self.seconds:.1f} s"]
        if self.problem:
            lines += _labelled("problem", self.problem)
        if self.score is not None and self.score.parts:
            lines += _labelled("parts", "  ".join(f"{name} {value:.3f}" for name, value in self.score.parts.items()))
        if self.task.truth:
            lines += _labelled("truth", "  ".join(f"{name}={value}" for name, value in self.task.truth.items()), 1)
        if not num_turns:
            lines += _labelled("prompt", self.task.prompt)
        for place, turn in enumerate(first_turns):
            lines += [f"turn {place + 1} of {num_turns}" if num_turns > 1 else "turn", *_lines_of(turn)]
        if self.output is not None:
            lines += _labelled("output", self.output)
        return _on_a_screen(lines)


_MOST_TURNS = 20
"""Turns of an episode that its repr looks at."""


def _summary(episode: Episode) -> str:
    reward = "no reward" if episode.score is None else f"reward {episode.reward:.3f}"
    name = clipped(f"{episode.task.source} {episode.task.id}", lines=1, width=60)
    turns = f"{len(episode.turns)} turn{'s' * (len(episode.turns) != 1)}"
    return f"{name}  {episode.outcome}  {reward}  {turns}, {episode.response_tokens} tokens"


def _lines_of(turn: Turn, lines: int = 2) -> list[str]:
    """Describe a turn: messages shown to the model, its answer, and its calls."""
    text_lines = []
    for message in turn.messages:
        text_lines += _labelled(str(message.get("role", "")), str(message.get("content") or ""), lines)
    text_lines += _labelled("answer", turn.text, lines)
    for call in turn.calls:
        seconds_text = "" if call.seconds is None else f"  {call.seconds:.2f} s"
        text_lines += _labelled("call", f"{call.name} {call.arguments}{seconds_text}{'  failed' * bool(call.error)}", 1)
    return text_lines


def _labelled(label: str, text: str, lines: int = 2) -> list[str]:
    """Return the first lines of a text, behind its label."""
    first, *other_lines = clipped(text, lines=lines, width=100).split("\n")
    return [f"  {clipped(label, lines=1, width=9):<9} {first}", *(f"{'':12}{line}" for line in other_lines)]


def _on_a_screen(lines: list[str]) -> str:
    """Join lines, leaving out the middle of more than fit on a screen."""
    if len(lines) > 24:
        lines = [*lines[:14], f"  … {len(lines) - 23} lines …", *lines[-9:]]
    return "\n".join(lines)


def _with_ids(context: npt.NDArray[np.int32], prompt: int, turn: Turn) -> Turn:
    """Return a turn with ids that are views of the last context of its run; `prompt` is the length of its prompt."""
    return turn.updated(prompt_ids=context[:prompt], token_ids=context[prompt : prompt + len(turn.logprobs)])


def _read_episode(kind: type[Episode], *values: object) -> Episode:
    episode = from_values(kind, *values)
    turns: list[Any] = list(episode.turns)
    for *earlier, last_place in episode.runs:
        if earlier:
            context = turns[last_place].context
            turns[last_place] = _with_ids(context, len(turns[last_place].prompt_ids), turns[last_place])
            for place in earlier:
                turns[place] = _with_ids(context, *turns[place])
    episode.complete(turns=tuple(turns))
    return episode


def _length(turn: Turn) -> int:
    return len(turn.prompt_ids) + len(turn.token_ids)


def _continues(turn: Turn, last_turn: Turn) -> bool:
    """Return True if a turn's prompt begins with the whole context of another turn."""
    prompt_ids, last_prompt_length, last_length = turn.prompt_ids, len(last_turn.prompt_ids), _length(last_turn)
    return (
        len(prompt_ids) >= last_length
        and prompt_ids[last_prompt_length:last_length].tobytes() == last_turn.token_ids.tobytes()
        and prompt_ids[:last_prompt_length].tobytes() == last_turn.prompt_ids.tobytes()
    )


def _join(turns: Sequence[Turn], run: Sequence[int]) -> Segment:
    """Make the segment of a run of turns."""
    ids = turns[run[-1]].context
    trained, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
    versions, indices = np.full((2, len(ids)), -1, np.int32)
    for place in run:
        turn = turns[place]
        span = slice(len(turn.prompt_ids), _length(turn))
        trained[span], logprobs[span], versions[span], indices[span] = True, turn.logprobs, turn.versions, place
    routed = _join_routed([turns[place].routed for place in run], len(ids))
    return Segment(token_ids=ids, trained=trained, logprobs=logprobs, versions=versions, turns=indices, routed=routed)


def _join_routed(turns: Sequence[npt.NDArray[Any] | None], tokens: int) -> npt.NDArray[Any] | None:
    """Return the experts of a segment's tokens, each as first computed; None if some are unknown."""
    parts, num_known = list[npt.NDArray[Any]](), 0
    for routed in turns:
        if routed is not None and len(routed) > num_known:
            parts.append(routed[num_known:])
            num_known = len(routed)
    return np.concatenate([*parts, parts[-1][-1:]]) if 0 < num_known == tokens - 1 else None


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

    def __repr__(self) -> str:
        name = clipped(f"{self.task.source} {self.task.id}", lines=1, width=60)
        return _on_a_screen([f"Group  {name}", *(f"  {_summary(episode)}" for episode in self.episodes)])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """P groups that are trained on together, all of the same size G.

    batch = await run.rollouts.next_batch()
    advantages = group_advantages(batch.rewards)  # [P, G]
    """

    groups: tuple[Group, ...]
    version: int
    """Latest published version when the batch was delivered; a token's lag is this minus its version."""

    @property
    def episodes(self) -> tuple[Episode, ...]:
        return tuple(episode for group in self.groups for episode in group.episodes)

    @property
    def rewards(self) -> torch.Tensor:
        """Reward of each episode, [P, G] float32."""
        import torch

        return torch.tensor([group.rewards for group in self.groups], dtype=torch.float32)

    @property
    def by_source(self) -> dict[str, Batch]:
        """The groups of each source as a batch of their own, in the order of their first groups."""
        groups: dict[str, list[Group]] = {}
        for group in self.groups:
            groups.setdefault(group.task.source, []).append(group)
        return {source: Batch(groups=tuple(parts), version=self.version) for source, parts in groups.items()}

    def __repr__(self) -> str:
        rewards = [reward for group in self.groups for reward in group.rewards]
        mean = f", reward {sum(rewards) / len(rewards):.3f} on average" if rewards else ""
        lines = [f"Batch  version {self.version}, {len(self.groups)} groups, {len(rewards)} episodes{mean}"]
        for group in self.groups:
            name = clipped(f"{group.task.source} {group.task.id}", lines=1, width=50)
            rewards_text = " ".join(f"{reward:.3g}" for reward in group.rewards[:8]) + " …" * (len(group.rewards) > 8)
            lines.append(f"  {name:<50}  {sum(group.rewards) / max(1, len(group.rewards)):>7.3f}  {rewards_text}")
        return _on_a_screen(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling(CompactRecord):
    """Sampling settings of a completion.

        Sampling(max_tokens=256, temperature=0.8, stop=("</answer>",))

    Top-p, top-k and penalties are deliberately left to `extra`: with them, the behaviour logprobs belong to another
    distribution than the trained one.
    """

    max_tokens: int
    """Maximum tokens of a completion."""
    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy."""
    seed: int | None = None
    """Seed of this completion; None draws a random one. A token's draw depends on the seed and on its position, so two
    completions with one seed draw the same numbers where their positions overlap."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion; excluded from its text, but their tokens are kept."""
    top_logprobs: int = 0
    """Number of most likely alternatives to report per token."""
    stop_ids: tuple[int, ...] = ()
    """Ids of tokens that end the completion, besides the ones in the engine's settings."""
    adapter: str = ""
    """Name of the loaded adapter to sample with; empty for the engine's own weights."""
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Engine-specific settings by the engine's names: `{"top_p": 0.9, "structured_outputs": {"json": schema}}`. A
    completion with any of these is not resumed on another engine once it has begun."""

    def __post_init__(self) -> None:
        # An engine in another process may be brought down by a number of another type, or never answer.
        for name in ("max_tokens", "seed", "top_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (hasattr(value, "__index__") or (name == "seed" and value is None)):
                raise ConfigError(f"{name} of a completion is {value!r:.60}", hint=f"set {name} to a whole number")
            object.__setattr__(self, name, None if value is None else operator.index(value))
        if not isinstance(self.adapter, str):
            raise ConfigError(f"adapter of a completion is {self.adapter!r:.60}", hint="name a loaded adapter")
        heat = self.temperature
        if isinstance(heat, bool) or not hasattr(heat, "__float__") or not 0 <= float(heat) < math.inf:
            raise ConfigError(f"temperature of a completion is {heat!r:.60}", hint="set it to 0 or more")
        object.__setattr__(self, "temperature", float(heat))
