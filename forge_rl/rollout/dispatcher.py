"""Decodes episodes' turns on the engines that the scheduler grants, and resumes them on others if an engine dies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from forge_rl.errors import ContextError, ForgeError, ReplicaError
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import InflightEpisode
from forge_rl.runtime.hold import Hold
from forge_rl.services.completion import GATHER_S, Observer, ResumableCompletion
from forge_rl.system.listeners import Listeners
from forge_rl.system.seeds import derive_seed
from forge_rl.token_arrays import TokenIds
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Sampling, Task, Turn


class Decoder(Protocol):
    """The part of the Generator that rollouts use."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def version(self) -> int | None: ...

    @property
    def listeners(self) -> Listeners[[]]: ...

    def engines(self) -> dict[int, int]: ...

    async def decode(self, completion: ResumableCompletion, *, engine: int | None = None) -> None: ...


StartBranch: TypeAlias = Callable[
    [InflightEpisode, Callable[[Task, "PolicyClient"], Awaitable[Episode]]], "asyncio.Task[None]"
]


class Probes(Protocol):
    """Attests the engines' version while they decode; see `VersionProbes`."""

    async def attest(self) -> None: ...

    def pop_metrics(self) -> dict[str, float]: ...


class Dispatcher:
    """Holds each episode until the scheduler grants it an engine; an episode has one engine at a time.

    Args:
        probes: attest the engines' version at the start of each batch; by default none do.
        wanted_engines: returns how many engines there should be; by default as many as have served at once.
        hold: the run's pause, during which the engines hold their requests; never paused by default.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        generator: Decoder,
        tokenizer: Tokenizer,
        *,
        wanted_engines: Callable[[], int] | None = None,
        hold: Hold | None = None,
        probes: Probes | None = None,
    ) -> None:
        self.probes = probes
        self._wanted_engines = wanted_engines
        self._most_engines = 0
        self.hold = hold or Hold()
        self.scheduler = scheduler
        self.generator = generator
        self.tokenizer = tokenizer
        self._grants: dict[InflightEpisode, asyncio.Future[None]] = {}
        self.update_engines()

    def update_engines(self) -> None:
        """Tell the scheduler which engines serve; called only on a change, as there may be a thousand engines."""
        self.scheduler.capacity.set_engines(self.generator.engines())

    def wanted_engines(self) -> int:
        """Return how many engines there should be: no fewer than serve."""
        serving = len(self.scheduler.capacity.engines)
        self._most_engines = max(self._most_engines, serving)
        return self._most_engines if self._wanted_engines is None else max(serving, self._wanted_engines())

    def grant(self) -> None:
        """Wake the episodes that were just granted an engine."""
        for episode in self.scheduler.pop_grants():
            granted = self._grants.get(episode)  # none yet if `request` has just been called for it
            if granted is not None and not granted.done():
                granted.set_result(None)

    def request(self, episode: InflightEpisode) -> asyncio.Future[None] | None:
        """Request an engine for an episode.

        Returns:
            A future that ends once an engine is granted, or None if one is granted now. Either way the caller must
            `release` the engine, even if it is cancelled before the grant.
        """
        if self.scheduler.decode_at_once(episode):
            return None
        self.scheduler.request_decode(episode)
        self.grant()
        # `grant` has just served it, before there was a future to wake.
        if episode.state == "decoding":
            return None
        granted = self._grants[episode] = asyncio.get_running_loop().create_future()
        return granted

    def release(self, episode: InflightEpisode, *, interrupted: bool) -> None:
        """Free an episode's engine for others; an interrupted episode is the next to get an engine."""
        self._grants.pop(episode, None)
        self.scheduler.finish_turn(episode, interrupted=interrupted)
        self.grant()

    def client(
        self, episode: InflightEpisode, sampling: Sampling, seed: int, start_branch: StartBranch | None = None
    ) -> PolicyClient:
        """Return an episode's policy client; with `start_branch`, the episode may have branches."""
        return PolicyClient(self, episode, sampling, seed, self.scheduler.own_s(episode), start_branch)


@dataclass(frozen=True)
class PolicyClient:
    """An episode's policy client.

    turn = await client(prompt_ids)
    """

    dispatcher: Dispatcher
    episode: InflightEpisode
    sampling: Sampling
    """Sampling settings of the episode's turns, without a seed."""
    seed: int
    """Seed of this attempt or branch, from which the seed of each turn is derived."""
    since_s: float
    """The episode's own time when this client was made."""
    _start_branch: StartBranch | None = None
    """Starts branches of the episode; None if it has none, as in an evaluation."""
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False)
    _turns: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False)
    """Numbers of the next turns."""

    def used_s(self) -> float:
        """Return the episode's seconds so far, excluding pauses and waits for an engine."""
        return self.dispatcher.scheduler.own_s(self.episode) - self.since_s

    @property
    def longest(self) -> int:
        """Maximum tokens of a prompt and its completion together."""
        return self.dispatcher.generator.max_model_len

    @property
    def tree(self) -> tuple[int, ...]:
        """Root of the tree that begins with this episode, for `Turn.branch`; () if it has no branches.

        An episode that is tried again begins another tree, as branches of the first one may go on.
        """
        group, tries = self.episode.group, self.episode.tries
        if self._start_branch is None or self.dispatcher.scheduler.leaves == 1:
            return ()
        return (self.episode.index + tries * len(group.episodes),)

    def take_branches(self, max_branches: int) -> list[InflightEpisode]:
        """Return up to `max_branches` episodes that are branches of this one from now on; each must then be started.

        Raises:
            ForgeError: the environment's factory allows no branches.
        """
        if self._start_branch is None:
            return []
        if self.dispatcher.scheduler.leaves == 1:
            raise ForgeError(
                "the environment asked for branches, but its factory sets no `leaves`",
                hint="set `leaves` on the class or function that makes it: the most episodes of a tree, such as 4",
            )
        return self.dispatcher.scheduler.branches(self.episode, max_branches)

    def start_branch(
        self,
        branch: InflightEpisode,
        node: tuple[int, ...],
        run: Callable[[Task, PolicyClient], Awaitable[Episode]],
    ) -> asyncio.Task[None]:
        """Start an episode of `take_branches`; its first attempt is `run`, with a client of its own.

        Args:
            node: its first node, see `Turn.branch`, which determines its seed: which of the reserved episodes becomes
                the branch may depend on time.
        """
        assert self._start_branch is not None, "there are no branches to start"
        seed = derive_seed(self.seed, "branch", node)
        return self._start_branch(branch, lambda task, client: run(task, replace(client, seed=seed)))

    async def __call__(
        self,
        prompt_ids: TokenIds,
        sampling: Sampling | None = None,
        *,
        observe: Observer | None = None,
        gather_s: float = GATHER_S,
    ) -> Turn:
        """Decode one completion, limited by the room in the context, on as many engines as needed.

        Concurrent calls decode one after the other. Settings without a seed get the next turn's. See
        `Generator.generate` for the arguments and further errors.

        Raises:
            ContextError: the context has no room for a single token.
        """
        dispatcher, sampling = self.dispatcher, sampling or self.sampling
        max_model_len = dispatcher.generator.max_model_len
        room = max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room for an answer in {max_model_len}",
                hint="raise --generator.max-model-len, or choose tasks with shorter prompts",
            )
        if sampling.seed is None:
            # Each turn has a seed of its own, so that no two turns of an attempt draw the same random numbers.
            sampling = sampling.updated(seed=derive_seed(self.seed, "turn", next(self._turns)))
        # An answer may fill the context; engines refuse requests that could exceed it.
        if room < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room)
        if sampling.adapter != self.sampling.adapter:  # an agent's own settings name none
            sampling = replace(sampling, adapter=self.sampling.adapter)
        completion = ResumableCompletion(prompt_ids, sampling, dispatcher.tokenizer, observe=observe, gather_s=gather_s)
        # An agent may send several requests at once, but an episode has one engine at a time.
        async with self._one_at_a_time:
            counted_tokens = 0
            while not completion.finish:
                interrupted = False
                try:
                    if (granted := dispatcher.request(self.episode)) is not None:
                        await granted
                    await dispatcher.generator.decode(completion, engine=self.episode.engine)
                except ReplicaError as error:
                    interrupted = True
                    # Tokens so far stay in `completion`; the next engine continues from them.
                    completion.fail_over(error)
                finally:
                    # Also if this was cancelled while it waited, as the grant may have come at the same time.
                    dispatcher.release(self.episode, interrupted=interrupted)
                    # Counted after each engine, so that what was decoded before a cancellation counts as discarded.
                    self.episode.decoded_tokens += completion.tokens - counted_tokens
                    counted_tokens = completion.tokens
        return completion.turn()
