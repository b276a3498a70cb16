"""Requests to a generator's engines: completions and texts to score, and which errors are an engine's own fault."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from forge_rl.errors import ConfigError, ContextError, DeadlineError, ReplicaError, ServiceError, WeightsError
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service
from forge_rl.services.completion import DraftCounts, ResumableCompletion, validate_chunk, validate_scores
from forge_rl.services.engine_pool import EnginePool, Lend
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.non_finite import NonFiniteTokens
from forge_rl.services.request_limits import RequestLimits
from forge_rl.token_arrays import Chunk, ScoredTokens, TokenIds
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Sampling

_ANSWER_S = 3600.0
"""Longest wait for the next chunk of a completion, or for scores, not counting pauses. A last resort:
--generator.stall-s finds engines that hang, and a request may wait long in the queue of a busy one."""


class EngineRequests:
    """Sends each request to one engine, checks what the engine answers, and replaces an engine that answers wrongly."""

    def __init__(
        self, config: GeneratorConfig, service: Service, pool: EnginePool, tokenizer: Tokenizer, lend: Lend
    ) -> None:
        self._config = config
        self._service = service
        self._pool = pool
        self._tokenizer = tokenizer
        self._lend = lend
        self._stopping = False
        self._trial = asyncio.Lock()
        """Held by a suspect completion until its first token, so that suspects run one at a time."""
        self._drafts = DraftCounts()
        self.non_finite = NonFiniteTokens()
        self.limits = RequestLimits(config.max_num_seqs * config.data_parallel_size)

    def stop(self) -> None:
        """Blame no engine for errors from now on, as the engines are being stopped."""
        self._stopping = True

    def drain_drafts(self) -> DraftCounts:
        """Return the counts of drafted tokens since the last call."""
        counts, self._drafts = self._drafts, DraftCounts()
        return counts

    async def decode(self, completion: ResumableCompletion, *, engine: int | None = None) -> None:
        """Decode the rest of a completion on one engine, passing it each chunk.

        Completions that may have killed several engines are tried one at a time, until the next token of each.
        Cancelling this cancels the request.

        Args:
            engine: index of the engine; by default the one with the fewest requests in flight.

        Raises:
            WeightsError: no version is loaded yet, or the last load failed.
            ConfigError: prompt and completion may exceed the context length, or vLLM refuses the request.
            ReplicaError: the engine died, failed, or sent garbage; earlier chunks are valid.
            DeadlineError: no chunk came for an hour.
            ServiceError: no engine is left.
        """
        # Engines read the model's settings, which need not name the token that ends turns.
        prompt_ids, sampling = completion.shown, completion.rest.updated(stop_ids=self._tokenizer.stop_ids)
        self._check(prompt_ids, sampling)
        is_suspect = completion.suspect
        # One at a time: a poisonous completion must not take down several engines while others are tried.
        if is_suspect:
            await self._trial.acquire()
        try:
            replica = await self._choose(engine)
            # Versions loaded from here on may produce tokens of this completion, each from some token on.
            first_load = self._pool.current

            def take(chunk: Chunk) -> bool:
                nonlocal is_suspect
                self._pool.note_progress(replica)
                # A token came, so this completion does not kill engines before they decode; the next suspect may run.
                if is_suspect:
                    self._trial.release()
                    is_suspect = False
                problem = validate_chunk(
                    chunk,
                    completion.sampling,
                    num_drawn=completion.tokens,
                    vocab_size=self._tokenizer.vocab_size,
                    versions=self._pool.versions[first_load:],
                )
                if not problem:
                    chunk, problem = self.non_finite.mask(chunk, completion.sampling, replica)
                if problem:
                    raise self._pool.mark_failed(replica, f"it sent garbage: {problem}")
                # Listeners read the engines' limits again, so that the scheduler sends no more than the cache holds.
                if chunk.cache is not None and self.limits.note(replica, chunk.cache):
                    self._service.listeners.tell()
                self._drafts.note(chunk)
                return completion.add(chunk)

            gather_s = completion.gather_s
            with self._blaming(replica, refuses=bool(sampling.extra)):
                await replica.ask("stream", prompt_ids, sampling, gather_s, deadline_s=_ANSWER_S, on_item=take)
            if not completion.finish:
                raise self._pool.mark_failed(replica, "it sent garbage: its stream ended without a finish")
        finally:
            if is_suspect:
                self._trial.release()

    async def score(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        adapter: str = "",
    ) -> ScoredTokens:
        """Score given tokens after a prompt, under the weights of the current version; see `DecodeEngine.score`.

        Engines that are paused, or have lent their devices to the trainer, resume for the duration.

        Raises:
            WeightsError: no version is loaded yet, or the last load failed.
            ContextError: prompt and tokens do not fit into the context.
            ConfigError: vLLM refuses the request.
            PoisonError: several engines in a row died of it.
            DeadlineError: no answer for an hour.
            ServiceError: no engine is left.
        """
        self._check_version()
        self._check_adapter(adapter)
        # To score, an engine also decodes one token, for which the context needs room.
        if len(prompt_ids) + len(token_ids) >= self._config.max_model_len:
            raise ContextError(
                f"{len(prompt_ids)} + {len(token_ids)} tokens to score do not fit into {self._config.max_model_len}",
                hint="raise max_model_len; one more token than those to score must fit",
            )

        async def attempt(replica: Replica) -> ScoredTokens:
            with self._blaming(replica):
                args = prompt_ids, token_ids, temperature, top_k, adapter
                scores = await replica.ask("score", *args, deadline_s=_ANSWER_S)
            self._pool.note_progress(replica)
            if problem := validate_scores(scores, len(token_ids), top_k, self._tokenizer.vocab_size):
                raise self._pool.mark_failed(replica, f"it sent garbage: {problem}")
            assert isinstance(scores, ScoredTokens)
            return scores

        async with self._lend():
            return await self._service.try_on(attempt)

    async def score_on_each(
        self, ids: TokenIds, *, adapter: str = ""
    ) -> dict[tuple[int, int], npt.NDArray[np.float64]]:
        """Score all tokens but the first of a text on every engine that serves, without those that die meanwhile.

        Args:
            adapter: name of a loaded adapter to score with; "" for the policy.

        Returns:
            [N] logprobs by the engine's index and number of restarts.

        Raises:
            WeightsError, ConfigError: all engines refuse.
        """

        async def attempt(replica: Replica) -> tuple[tuple[int, int], npt.NDArray[np.float64]]:
            with self._blaming(replica):
                scores = await replica.ask("score", ids[:1], ids[1:], 1.0, 0, adapter, deadline_s=_ANSWER_S)
            if problem := validate_scores(scores, len(ids) - 1, 0, self._tokenizer.vocab_size):
                raise self._pool.mark_failed(replica, f"it sent garbage: {problem}")
            return (replica.index, replica.incarnation), np.asarray(scores.logprobs, np.float64)

        return dict(await self._pool.each("scoring probes", attempt))

    @contextlib.contextmanager
    def _blaming(self, replica: Replica, *, refuses: bool = False) -> Iterator[None]:
        """Count an engine as failed if it reports an error of its own in the body.

        A refusal by a remote engine counts as its failure too, unless the request may be at fault (`refuses`): it would
        otherwise end the run.
        """
        try:
            yield
        except (ReplicaError, DeadlineError):
            raise
        except (ConfigError, WeightsError) as error:
            # Indices below the number of URLs are those of remote engines.
            if replica.index >= len(self._config.urls) or (refuses and isinstance(error, ConfigError)):
                raise
            raise self._pool.mark_failed(replica, f"it refuses: {error.message}") from error
        except ServiceError as error:
            if self._stopping:
                raise
            raise self._pool.mark_failed(replica, f"it failed: {error.message}") from error

    async def _choose(self, engine: int | None) -> Replica:
        if engine is None:
            return await self._service.available()
        for replica in self._service.replicas:
            if replica.index == engine and replica.serving:
                return replica
        error = ReplicaError("it does not serve", service=self._service.name, replica=engine)
        # It cannot have died of a request that it never had.
        error.blamed = False
        raise error

    def _check(self, prompt_ids: TokenIds, sampling: Sampling) -> None:
        """Raise an error of `decode` if the request cannot be served."""
        self._check_version()
        self._check_adapter(sampling.adapter)
        if len(prompt_ids) + sampling.max_tokens > self._config.max_model_len:
            raise ConfigError(
                f"a prompt of {len(prompt_ids)} tokens and {sampling.max_tokens} new ones exceed "
                f"{self._config.max_model_len}",
                hint="raise --generator.max-model-len, or choose tasks with shorter prompts",
            )

    def _check_version(self) -> None:
        if self._pool.version is None:
            raise WeightsError(f"the engines hold no weights: {self._pool.refusal}", hint="load a version first")

    def _check_adapter(self, name: str) -> None:
        if name and name not in self._pool.adapters:
            names = ", ".join(self._pool.adapters) or "none"
            raise ConfigError(
                f"the engines have no adapter {name!r:.80}", hint=f"load it first; loaded are: {names:.400}"
            )
