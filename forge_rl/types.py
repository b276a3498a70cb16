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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Message = Mapping[str, str]
"""One chat message: {"role": "system" | "user" | "assistant" | "tool", "content": text}."""


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
            "`await run.reward.replace(function)`",
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


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One completion with its prompt. All ids are the engine's own; text is never tokenised again.

    Turn(prompt_ids=(1, 17, 4), token_ids=(9, 2), logprobs=(-0.7, -0.1), versions=(3, 3), text="5")
    """

    prompt_ids: tuple[int, ...]
    """Every token that the model saw before this completion."""
    token_ids: tuple[int, ...]
    """Tokens of the completion, with the end-of-sequence token when the model produced one."""
    logprobs: tuple[float, ...]
    """Behaviour log-probability of each completion token, from the engine, under the distribution it sampled from."""
    versions: tuple[int, ...]
    """Version of the weights that produced each completion token."""
    text: str
    """The completion, decoded, without special tokens."""
    truncated: bool = False
    """True if the completion was cut by a token limit."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.versions)}
        assert len(lengths) == 1, f"ids, logprobs and versions of a turn differ in length: {lengths}"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a completion as it is decoded. Token fields are aligned, as in Turn."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probabilities as in Turn; NaN in greedy decoding."""
    versions: tuple[int, ...]
    text: str
    """Text that these tokens add; may lag behind them where a character is not complete."""
    finish: Literal["", "stop", "length"] = ""
    """Reason why the completion ends with this chunk; "" while it goes on."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The likeliest (id, logprob) pairs at each token, if Sampling.top_logprobs asked for them."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One training sequence: a longest run of turns in which each prompt extends what came before.

    All fields have length T. Entry t describes token t itself (not t+1); logprobs are 0, versions and turns -1 where
    trained is False.
    """

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    turns: tuple[int, ...]
    """Index of the token's turn within its episode."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """All turns of one attempt at one task, scored.

    episode = Episode(task=task, turns=(first, second), reward=1.0)
    episode.text, episode.response_tokens
    """

    task: Task
    turns: tuple[Turn, ...]
    reward: float
    outcome: Outcome = Outcome.COMPLETED
    problem: str = ""
    """Cause of the error, where the outcome is one; what failed at first, where the score was tried again."""
    seconds: float = 0.0
    """Wall time from the first request to the score."""

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Turns joined by longest exact token prefix; a rewritten history starts a new segment of the same reward."""
        joined: list[list[tuple[int, Turn]]] = []
        contexts: list[tuple[int, ...]] = []
        for index, turn in enumerate(self.turns):
            fitting = [at for at, context in enumerate(contexts) if turn.prompt_ids[: len(context)] == context]
            at = max(fitting, key=lambda at: len(contexts[at]), default=len(joined))
            if at == len(joined):
                joined.append([])
                contexts.append(())
            joined[at].append((index, turn))
            contexts[at] = turn.prompt_ids + turn.token_ids
        return tuple(_segment(turns) for turns in joined)

    @property
    def response_tokens(self) -> int:
        """Number of tokens that the model produced, over all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def text(self) -> str:
        """Text of the last completion."""
        return self.turns[-1].text if self.turns else ""


def _segment(turns: list[tuple[int, Turn]]) -> Segment:
    ids: list[int] = []
    trained: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    indices: list[int] = []
    for index, turn in turns:
        shown = turn.prompt_ids[len(ids) :]
        ids += [*shown, *turn.token_ids]
        trained += [False] * len(shown) + [True] * len(turn.token_ids)
        logprobs += [0.0] * len(shown) + list(turn.logprobs)
        versions += [-1] * len(shown) + list(turn.versions)
        indices += [-1] * len(shown) + [index] * len(turn.token_ids)
    return Segment(
        token_ids=tuple(ids),
        trained=tuple(trained),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        turns=tuple(indices),
    )


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

    Top-p, top-k and penalties are left out on purpose: they would make the behaviour logprobs those of another
    distribution than the one that is trained.
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
