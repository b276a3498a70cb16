"""Runs one attempt at a task: turns until its environment is done, then the score."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_rl.algorithms.tree import most_surprising
from forge_rl.errors import ContextError, DeadlineError, ForgeError, InfrastructureError, ReplicaError, SpendingError
from forge_rl.rewards.scorer import scored
from forge_rl.rollout.dispatcher import PolicyClient
from forge_rl.token_arrays import TokenIds
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Message, Outcome, Sampling, Score, Task, ToolCall, Turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forge_rl.envs.protocol import Parsed, Step
    from forge_rl.rollout.state import InflightEpisode
    from forge_rl.services.environment import Environment, EnvSession, LocalSession
    from forge_rl.services.reward import RewardService

Tools = Sequence["Mapping[str, object]"]
Parse = Callable[[Turn, Tools], Awaitable["Parsed"]]
"""Parses a turn into content and calls of these tools."""
_NOTHING: tuple[None, Mapping[str, float]] = (None, {})
"""Reward and parts of a step that has none; shared, as one per step would burden the garbage collector."""
Decode = Callable[..., Awaitable[Turn]]
"""Decodes a prompt into a new turn, by the episode's sampling settings or those given, such as a PolicyClient."""


@dataclass(kw_only=True)
class _Path:
    """State of an episode so far; its branches start with copies."""

    session: EnvSession | LocalSession
    messages: tuple[Message, ...]
    """Messages that are new to the model before the next turn."""
    prompt_ids: TokenIds
    """Prompt of the next turn."""
    sampling: Sampling | None = None
    """Sampling settings of the next turn, if they are not the client's."""
    tools: Tools
    branch: tuple[int, ...]
    """Node of the next turn, see `Turn.branch`."""
    turns: list[Turn] = field(default_factory=list)
    step_rewards: list[tuple[float | None, Mapping[str, float]]] = field(default_factory=list)
    """Reward of each step, and its parts."""
    pieces: int = 0
    """Number of turns before the last that are part of the same completion, within which the episode forked."""
    decoding: bool = False
    """True while an error would be ours rather than the environment's, and must be raised."""


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes, each in an environment session of its own.

    runner = EpisodeRunner(tokenizer, environment, reward, parse)
    episode = await runner(task, client)
    """

    tokenizer: Tokenizer
    environment: Environment
    reward: RewardService
    """Scores episodes that their environment does not score. A reward that needs the whole group is called later."""
    parse: Parse | None = None
    """Parses tool calls from turns if the task has tools."""
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time

    def __call__(self, task: Task, decode: Decode) -> Coroutine[Any, Any, Episode]:
        """Run one episode. Failures of services become outcomes; errors of `decode`, except dead engines, are raised.

        Branches that its environment asks for are episodes of their own, started by `decode` if it is a PolicyClient.

        Raises:
            PoisonError: the task killed several engines, one after another.
            ContextError: the task's prompt leaves no room for an answer. In later turns, the episode is truncated.
            SpendingError: a judge's spending limit is reached.
        """
        return self._run(None, None, task, decode)  # awaited directly, as each coroutine in a chain costs every turn

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Let environments prepare for coming tasks; see `Environment.prepare`."""
        self.environment.prepare(tasks)

    async def _begin(self, task: Task, decode: Decode) -> _Path:
        """Open the environment; returns the path before its first turn."""
        session, observation = await self.environment.open(task)
        try:
            tools, messages = observation.tools or task.tools, tuple(observation.messages)
            prompt_ids = self.tokenizer.render(messages, tools=tools)
        except BaseException:
            # A task whose messages cannot be rendered must not leave its environment open.
            session.abandon()
            raise
        tree = decode.tree if isinstance(decode, PolicyClient) else ()
        return _Path(session=session, messages=messages, prompt_ids=prompt_ids, tools=tools, branch=tree)

    async def _run(self, path: _Path | None, failed: Exception | None, task: Task, decode: Decode) -> Episode:
        """Run an episode from its beginning, or a branch from its path; raises as `__call__`.

        Args:
            failed: error of a branch whose environment could not be copied; it has no path.
        """
        began, began_at = self.clock(), self.wall_clock()
        try:
            if failed is not None:
                raise failed
            if path is None:
                path = await self._begin(task, decode)
            step, truncated = await self._play(path, task, decode)
        except BaseException as error:
            if path is not None:
                path.session.abandon()
            if not isinstance(error, Exception) or isinstance(error, SpendingError):
                raise
            # Lost services are retried as infrastructure's failures; what the environment raises is an outcome; what
            # decoding or parsing raises is a bug of ours.
            outcome = Outcome.ENVIRONMENT_ERROR
            if isinstance(error, DeadlineError | ReplicaError | InfrastructureError):
                outcome = Outcome.INFRASTRUCTURE_ERROR
            elif path is not None and path.decoding:
                raise
            turns = () if path is None else tuple(path.turns)
            episode = Episode(task=task, turns=turns, outcome=outcome, problem=str(error))
        else:
            outcome = Outcome.TRUNCATED if truncated else Outcome.COMPLETED
            if step.model_error:
                outcome = Outcome.MODEL_ERROR
            episode = Episode(task=task, turns=tuple(path.turns), output=step.output, outcome=outcome)
            episode = await scored(episode, self.reward, _own_score(path.step_rewards, len(path.turns)))
        return episode.updated(seconds=self.clock() - began, began=began_at)

    async def _play(self, path: _Path, task: Task, decode: Decode) -> tuple[Step, bool]:
        """Take turns until the environment is done, or the context full.

        Returns:
            The last step, and whether a token limit cut the last completion, or left no room for another.
        """
        turns, full = path.turns, False
        while True:
            path.decoding, parsed, asked_s = True, None, self.clock()
            try:
                decode_args = (path.prompt_ids,) if path.sampling is None else (path.prompt_ids, path.sampling)
                turns.append(await decode(*decode_args))
                turns[-1].complete(messages=path.messages, seconds=self.clock() - asked_s, branch=path.branch)
                if path.tools and self.parse is not None:
                    completion = self._whole(path)
                    # A call that is only drafted in a thought is none; gpt-oss's calls are marked apart from thoughts.
                    is_thought = completion.answer == "" and not self.tokenizer.thoughts.is_harmony
                    parsed = ("", ()) if is_thought else await self.parse(completion, path.tools)
            except ContextError:
                full = bool(turns)
                if not full:
                    raise
            path.decoding = False
            truncated, asked_s = full or turns[-1].truncated, self.clock()
            # Where the context is full, the environment gets a last step without a text, so that it can still reward
            # the episode.
            text = "" if full else self._seen(path)
            step = await path.session.step(text, truncated=truncated, parsed=parsed)
            if not full:
                calls = step.calls or (parsed[1] if parsed else ())
                turns[-1].complete(response_s=self.clock() - asked_s, calls=calls)
            path.step_rewards.append((step.reward, step.parts) if step.reward is not None or step.parts else _NOTHING)
            if step.forks and not full and isinstance(decode, PolicyClient):
                await self._fork_within(path, step.forks, task, decode)
            # The default output is the last turn's text, which here is only the last piece of the answer.
            if step.done and step.output is None and path.pieces:
                trajectory = self._whole(path)
                step = replace(step, output=trajectory.text if self.environment.thoughts else trajectory.content)
            if full and not step.done:
                await path.session.close()
            if full or step.done:
                return step, truncated
            path.prompt_ids = self._next_prompt(turns[-1], step, path.tools, parsed[1] if parsed else ())
            path.messages = step.messages if step.history is None else step.history
            path.sampling, path.pieces = None, 0
            if step.branches > 1 and isinstance(decode, PolicyClient):
                await self._fork(path, step.branches, task, decode)
            del step  # a history may be large, and there are thousands of episodes

    async def _fork(self, path: _Path, num_branches: int, task: Task, client: PolicyClient) -> None:
        """Split an episode into `num_branches`, itself included, or as many as its tree has room for.

        An error of a fork ends only its branch.
        """
        # With the context full, a branch could not decode a single token of its own.
        branches = client.take_branches(num_branches - 1) if len(path.prompt_ids) < client.longest else []
        for number, branch in enumerate(branches, start=1):
            # Lists are copied; turns themselves are shared by all branches.
            fork = replace(path, branch=(*path.branch, number), turns=[*path.turns], step_rewards=[*path.step_rewards])
            await self._start(branch, fork, path.session.fork, client)
        if branches:
            path.branch = (*path.branch, 0)

    async def _start(
        self,
        branch: InflightEpisode,
        fork: _Path,
        copy: Callable[[], Awaitable[EnvSession | LocalSession]],
        client: PolicyClient,
    ) -> None:
        """Start a branch in the session that `copy` returns."""
        error: Exception | None = None
        try:
            fork.session = await copy()
        except Exception as copy_error:
            error = copy_error
        fork_path = fork if error is None else None
        running = client.start_branch(branch, fork.branch, functools.partial(self._run, fork_path, error))
        if error is None:  # it may be cancelled before its first step
            running.add_done_callback(functools.partial(_abandon, fork.session))

    async def _fork_within(self, path: _Path, num_forks: int, task: Task, client: PolicyClient) -> None:
        """Start up to `num_forks` branches from within the last turn of a path, at the most surprising tokens.

        The turn is cut there into turns that continue each other, so that each node of the tree has its own.
        """
        full_turn = path.turns.pop()
        places = most_surprising(full_turn.logprobs, num_forks)
        branches = client.take_branches(len(places)) if places else []
        *earlier, last = path.step_rewards
        start = 0
        # The tree may have room for fewer branches than places were found: then the most surprising of them.
        for place, branch in zip(most_surprising(full_turn.logprobs, len(branches)), branches, strict=True):
            path.turns.append(self._piece(full_turn, start, place, path.branch))
            path.pieces += 1
            # Each piece is a turn and so has a step; only the last one has the environment's reward.
            earlier.append((None, {}))
            fork = replace(path, branch=(*path.branch, 1), turns=[*path.turns], step_rewards=[*earlier], messages=())
            fork.prompt_ids = fork.turns[-1].context
            # Pieces share the completion's max_tokens, so a branch may write what is left of it.
            used_tokens = sum(len(turn.token_ids) for turn in fork.turns[-fork.pieces :])
            fork.sampling = replace(client.sampling, max_tokens=client.sampling.max_tokens - used_tokens)
            await self._start(branch, fork, functools.partial(path.session.fork, undo_last=True), client)
            path.branch, start = (*path.branch, 0), place
        path.turns.append(
            self._piece(full_turn, start, len(full_turn.token_ids), path.branch) if branches else full_turn
        )
        path.step_rewards = [*earlier, last]

    def _whole(self, path: _Path) -> Turn:
        """Return the last completion, which is the last turn unless the episode forked within it."""
        # The pieces' prompts overlap: the first one's prompt and all of their tokens are the whole answer.
        *earlier, last = path.turns[-1 - path.pieces :]
        if not earlier:
            return last
        parts = [*earlier, last]
        ids = np.concatenate([part.token_ids for part in parts])
        return replace(
            last,
            prompt_ids=parts[0].prompt_ids,
            token_ids=ids,
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            text=(text := self.tokenizer.decode(ids)),
            answer=self.tokenizer.thoughts.answer(parts[0].prompt_ids, ids, text),
        )

    def _seen(self, path: _Path) -> str:
        """Return what the environment sees of the last completion."""
        completion, tokenizer, thoughts = self._whole(path), self.tokenizer, self.environment.thoughts
        ids = completion.token_ids
        text = tokenizer.tagged_text(ids, completion.text)
        if thoughts or text == completion.text:
            return text if thoughts else completion.content
        answer = tokenizer.thoughts.answer(completion.prompt_ids, ids, text, tokenizer.tagged)
        return text if answer is None else answer

    def _piece(self, full_turn: Turn, start: int, end: int, branch: tuple[int, ...]) -> Turn:
        """Return a part of a turn, from token `start` to `end`, as a turn of its own; the last part keeps the times."""
        ids, context = full_turn.token_ids[start:end], len(full_turn.prompt_ids) + end
        is_last = end == len(full_turn.token_ids)
        text = self.tokenizer.decode(ids)
        piece = full_turn.updated(
            prompt_ids=full_turn.context[: context - len(ids)],
            token_ids=ids,
            logprobs=full_turn.logprobs[start:end],
            versions=full_turn.versions[start:end],
            text=text,
            answer=self.tokenizer.thoughts.answer(full_turn.context[: context - len(ids)], ids, text),
            branch=branch,
            # As from an engine: experts of each token of the context but the last.
            routed=None if full_turn.routed is None else full_turn.routed[: context - 1],
        )
        if start:
            piece.complete(messages=())
        if not is_last:
            piece.complete(calls=(), truncated=False, seconds=0.0, response_s=0.0)
        return piece

    def _next_prompt(self, turn: Turn, step: Step, tools: Tools, calls: Sequence[ToolCall]) -> TokenIds:
        """Return the next prompt: everything so far plus the new messages, or a new history.

        Raises:
            ForgeError: the step continues a message that the model has ended.
        """
        if step.continues:
            if not turn.truncated:
                raise ForgeError(
                    "a step continues the model's message, which the model has ended",
                    hint="set `continues` only if `truncated` is true",
                )
            return turn.context
        if step.history is not None:
            return self.tokenizer.render(step.history, tools=tools)
        # Templates need ids and names of calls before their results; arguments are in the tokens already.
        call_messages: list[Message] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": {}}} for call in calls
        ]
        return self.tokenizer.extend(turn.context, step.messages, tools=tools, calls=call_messages)


def _abandon(session: EnvSession | LocalSession, _: object) -> None:
    session.abandon()


def _own_score(step_rewards: Sequence[tuple[float | None, Mapping[str, float]]], turns: int) -> Score | None:
    """Return the environment's score, the sum of its steps' rewards; None if it gave none.

    If a step before the last has a reward, the score also has the reward of each turn.
    """
    if all(reward is None for reward, _ in step_rewards):
        return None
    rewards = [reward or 0.0 for reward, _ in step_rewards]
    parts: dict[str, float] = {}
    for _, values in step_rewards:
        for name, value in values.items():
            parts[name] = parts.get(name, 0.0) + value
    turn_rewards = rewards[:turns]
    # With the context full, the last step has no turn of its own; its reward goes to the last turn.
    turn_rewards[-1] += sum(rewards[turns:])
    has_turn_rewards = any(reward is not None for reward, _ in step_rewards[:-1])
    return Score(
        total=sum(rewards), parts=parts, turns=turn_rewards if has_turn_rewards else (), turns_in_total=has_turn_rewards
    )
