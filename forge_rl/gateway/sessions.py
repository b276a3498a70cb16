"""Sessions: one episode's API key, and its turns recorded token for token."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forge_rl.gateway.errors import ApiError
from forge_rl.system.seeds import derive_seed
from forge_rl.system.tasks import cancel_once
from forge_rl.token_arrays import TokenIds
from forge_rl.types import Sampling, Turn

SESSION_FULL = "session_limit_exceeded"
"""Error code of requests beyond a session's limits."""


@dataclass(kw_only=True, eq=False, repr=False)
class Session:
    """One episode at the gateway; created by `Gateway.open`."""

    key: str
    """API key of the session's requests."""
    base_url: str
    """Base URL for OpenAI's clients."""
    task_id: str
    """Id of the episode's task, for display."""
    model: str
    """Name of the policy in requests."""
    sampling: Sampling
    """The turns' sampling settings."""
    most_turns: int
    """Maximum number of turns."""
    most_tokens: int
    """Maximum tokens of all turns and their prompts together."""
    on_close: Callable[[], object]
    """Called when the session closes; revokes its key."""
    closed: bool = False
    running: set[asyncio.Task[None]] = field(default_factory=set)
    """Requests in flight."""
    refusal: ApiError | None = None
    """Error response of the last request, if it failed."""
    _tokens: int = 0
    _turns: list[Turn] = field(default_factory=list)
    _contexts: dict[bytes, npt.NDArray[np.int32]] = field(default_factory=dict)
    """Prompt and completion ids of recorded turns, by the digest of their messages."""
    _texts: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    """Prompt and completion ids of recorded turns outside of chats, by their text."""
    _times_asked: Counter[str] = field(default_factory=Counter)
    """Number of completions by the digest of their prompt."""

    @property
    def anthropic_url(self) -> str:
        """Base URL for Anthropic's clients, which add the version themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Turns so far, in the order in which they finished. Logprobs of greedy turns are NaN, which packing masks."""
        return tuple(self._turns)

    def check_room(self, num_completions: int) -> None:
        """Raise ApiError if `num_completions` more completions would exceed the session's limits."""
        # Requests count once they are recorded: concurrent ones may together exceed a limit.
        turns, tokens = len(self._turns) + num_completions, self._tokens
        if turns <= self.most_turns and tokens < self.most_tokens:
            return
        problem, flag = f"would have {turns} turns, more than {self.most_turns}", "turns"
        if turns <= self.most_turns:
            problem, flag = f"has {tokens} tokens of at most {self.most_tokens}", "tokens"
        raise ApiError(400, f"the session {problem} (--gateway.session-{flag})", code=SESSION_FULL)

    def close(self) -> tuple[Turn, ...]:
        """Close the session: revoke its key, and abort requests in flight without recording them.

        Returns:
            The session's turns.
        """
        if not self.closed:
            self.closed = True
            self.on_close()
            for task in self.running:
                cancel_once(task)
        return self.turns

    async def ended(self) -> None:
        """Wait, after `close`, until the session's requests have left the engines."""
        if running := tuple(self.running):
            await asyncio.wait(running)

    def seed_for(self, prompt_ids: npt.NDArray[np.int32]) -> int | None:
        """Return a new seed for each completion of a prompt, independent of the order of concurrent requests."""
        if self.sampling.seed is None:
            return None
        # By prompt and number of earlier requests for it, not by arrival: the order of concurrent requests varies
        # between runs.
        prompt = hashlib.blake2b(prompt_ids.astype(np.int64).tobytes(), digest_size=16).hexdigest()
        self._times_asked[prompt] += 1
        return derive_seed(self.sampling.seed, "agent turn", prompt, self._times_asked[prompt] - 1)

    def record(self, turn: Turn, *, digest: bytes | None = None, text: str | None = None) -> None:
        """Record a turn.

        Args:
            turn: the turn, with the engine's token ids.
            digest: digest of the tools and messages, including the returned one.
            text: prompt and completion as text, if the request was not a chat.
        """
        # Only the refusal of the last request counts, and this one succeeded.
        self.refusal = None
        self._turns.append(turn)
        ids = turn.context
        self._tokens += len(ids)
        if digest is not None:
            self._contexts[digest] = ids
        if text is not None:
            self._texts.setdefault(text, ids)

    def context(self, digest: bytes) -> npt.NDArray[np.int32] | None:
        """Return the token ids of the last turn with this digest of its messages; None if there is none."""
        return self._contexts.get(digest)

    def longest_prefix(self, text: str) -> tuple[str, TokenIds]:
        """Return the longest recorded text that is a prefix of `text`, and its ids; both are empty if there is none."""
        # A copy, as other requests may be recorded while a thread searches.
        prefix = max(filter(text.startswith, list(self._texts)), key=len, default="")
        return prefix, self._texts.get(prefix, ())

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"Session  task {self.task_id or '-'}  {state}  turns {len(self._turns)}"
