"""Samples for all tenants from one set of engines: from the base, or from adapters that are loaded on demand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from forge_rl.errors import ConfigError, ContextError
from forge_rl.gateway.errors import ApiError
from forge_rl.system.seeds import derive_seed
from forge_rl.system.tasks import task_group
from forge_rl.tinker import wire
from forge_rl.tinker.checkpoints import CheckpointStore
from forge_rl.tinker.futures import FutureResult
from forge_rl.tinker.requests import SampleRequest
from forge_rl.tinker.sessions import Sampler
from forge_rl.token_arrays import ScoredTokens, TokenIds
from forge_rl.types import Sampling, Turn


class SamplingEngines(Protocol):
    """Engines that serve adapters; `Generator` implements it."""

    @property
    def max_model_len(self) -> int: ...
    async def load_adapter(self, name: str, folder: Path) -> None: ...
    async def drop_adapter(self, name: str) -> None: ...
    async def generate(self, prompt_ids: TokenIds, sampling: Sampling) -> Turn: ...
    async def score(
        self, prompt_ids: TokenIds, token_ids: TokenIds, *, temperature: float = 1.0, top_k: int = 0, adapter: str = ""
    ) -> ScoredTokens: ...


class LoadedAdapters:
    """The adapters in the engines, loaded on demand; the one idle longest makes room.

        async with loaded.using(folder) as name:
            turn = await engines.generate(prompt_ids, Sampling(max_tokens=64, adapter=name))

    Args:
        max_loaded: maximum number that engines hold at a time; further requests wait.
    """

    def __init__(self, engines: SamplingEngines, *, max_loaded: int) -> None:
        self._engines = engines
        self._max_loaded = max_loaded
        self._users: OrderedDict[str, int] = OrderedDict()
        """Number of requests that use each loaded adapter, least recently used first."""
        self._changing = asyncio.Lock()
        self._released = asyncio.Event()

    @contextlib.asynccontextmanager
    async def using(self, folder: Path | None) -> AsyncIterator[str]:
        """Hold an adapter in the engines inside the context; yields its name there, "" for the base."""
        if folder is None:
            yield ""
            return
        # The name depends on the file's time too, as a checkpoint may be overwritten under its path.
        text = f"{folder} {(folder / 'checkpoint.json').stat().st_mtime_ns}"
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        while not await self._take(name, folder):
            await self._released.wait()
        try:
            yield name
        finally:  # must not await: a client may cancel its request a second time
            self._users[name] -= 1
            self._released.set()

    async def _take(self, name: str, folder: Path) -> bool:
        """Count a request as a user of an adapter, which is loaded if needed; False while others use all places."""
        async with self._changing:
            if name not in self._users:
                # In order of use, so that the first one without users is the one idle longest.
                idle = next((loaded for loaded, users in self._users.items() if not users), None)
                if len(self._users) >= self._max_loaded and idle is None:
                    # Nothing is awaited between the look and here, so that no release is missed.
                    self._released.clear()
                    return False
                await _to_its_end(self._load(name, folder, idle if len(self._users) >= self._max_loaded else None))
            self._users[name] += 1
            self._users.move_to_end(name)
            return True

    async def _load(self, name: str, folder: Path, idle: str | None) -> None:
        """Load an adapter, in place of an idle one."""
        if idle is not None:
            await self._engines.drop_adapter(idle)
            del self._users[idle]
        await self._engines.load_adapter(name, folder)
        self._users[name] = 0


async def _to_its_end(work: Coroutine[None, None, None]) -> None:
    """Wait for work to finish even if the waiting task is cancelled, and raise the cancellation afterwards.

    All tenants share the engines' places for adapters; a load cut off by one tenant's cancelled request would leave
    them miscounted.
    """
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    error = task.exception()
    if cancelled:
        raise asyncio.CancelledError
    if error is not None:
        raise error


class SampleService:
    """Answers requests for samples.

    Args:
        max_scored: maximum tokens of a prompt whose logprobs are asked for.
    """

    def __init__(
        self, engines: SamplingEngines, loaded: LoadedAdapters, store: CheckpointStore, *, seed: int, max_scored: int
    ) -> None:
        self._engines = engines
        self._loaded = loaded
        self._store = store
        self._seed = seed
        self._max_scored = max_scored

    def tokens_of(self, request: SampleRequest) -> int:
        """Return the maximum tokens of a request: its prompt and all of its samples."""
        prompt = sum(len(chunk.tokens) for chunk in request.prompt.chunks)
        return prompt + request.num_samples * min(
            request.sampling_params.max_tokens or self._engines.max_model_len, self._engines.max_model_len
        )

    async def sample(
        self, request: SampleRequest, sampler: Sampler, tenant: str
    ) -> tuple[FutureResult, Mapping[str, int]]:
        """Answer a request.

        Returns:
            The result, and counts for its tenant's account.

        Raises:
            ApiError, ForgeError: it cannot be answered.
        """
        prompt = np.array([token for chunk in request.prompt.chunks for token in chunk.tokens], np.int32)
        is_scored = request.sampling_params.temperature == 0 or request.topk_sample_logprobs > 0
        room = self._engines.max_model_len - len(prompt) - is_scored  # scoring tokens decodes one more
        if not len(prompt) or room < 1:
            raise ApiError(400, f"a prompt of {len(prompt)} tokens; the context has {self._engines.max_model_len}")
        scores_prompt = bool(request.prompt_logprobs or request.topk_prompt_logprobs)
        if scores_prompt and len(prompt) > self._max_scored:
            raise ApiError(400, f"logprobs of a prompt of {len(prompt)} tokens; at most {self._max_scored} fit here")
        if request.prompt_logprobs_last_n is not None and not request.prompt_logprobs_last_n < len(prompt):
            raise ApiError(400, "prompt_logprobs_last_n is not below the prompt's length")
        folder = None
        if sampler.model_path is not None:
            _, checkpoint, folder = self._store.find(sampler.model_path, tenant)
            if checkpoint.kind != "sampler_weights":
                raise ApiError(400, f"{checkpoint.path} holds a training state; sample from sampler_weights")
        async with self._loaded.using(folder) as adapter:
            try:
                settings = [self._sampling(request, sampler, index, room) for index in range(request.num_samples)]
                async with task_group() as group:  # when one fails, the others end: they no longer count as in flight
                    tasks = [
                        group.create_task(self._engines.generate(prompt, replace(sampling, adapter=adapter)))
                        for sampling in settings
                    ]
                samples = [await self._sample_of(prompt, task.result(), request, adapter) for task in tasks]
                scores = None
                # The first token has no logprob.
                if scores_prompt and len(prompt) > 1:
                    scores = await self._engines.score(
                        prompt[:1], prompt[1:], top_k=request.topk_prompt_logprobs, adapter=adapter
                    )
            except (ContextError, ConfigError) as error:
                raise ApiError(400, error.message) from error
        counts = {"prompt_tokens": len(prompt), "sampled_tokens": sum(len(sample.token_ids) for sample in samples)}
        logprobs = top = None
        if scores_prompt:
            logprobs = np.full(len(prompt), np.nan, np.float32)
            k = request.topk_prompt_logprobs
            if scores is not None:
                logprobs[1:] = scores.logprobs
                if k:
                    top_ids = np.concatenate([np.zeros((1, k), np.int32), scores.top_ids])
                    top = top_ids, np.concatenate([np.full((1, k), np.nan, np.float32), scores.top_logprobs])
            if request.prompt_logprobs_last_n is not None:
                logprobs[: len(prompt) - request.prompt_logprobs_last_n] = np.nan
        return FutureResult(body=wire.encode_samples(samples, logprobs, top), is_protobuf=True), counts

    def _sampling(self, request: SampleRequest, sampler: Sampler, index: int, room: int) -> Sampling:
        params = request.sampling_params
        if params.seed is not None:
            seed = derive_seed(params.seed, "choice", index)
        else:
            # From the place of the request in its session, so that a client that is run again gets the same samples.
            seed = derive_seed(self._seed, "sample", sampler.seq, request.seq_id or 0, index)
        extra: dict[str, object] = {}
        if params.top_p < 1:
            extra["top_p"] = params.top_p
        if params.top_k > 0:
            extra["top_k"] = params.top_k
        # The API takes one text, a list of texts, or a list of token ids.
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        # An explicit empty list stops at nothing, not even at the end of a turn; None keeps the model's own stops.
        if params.stop == []:
            extra["ignore_eos"] = True
        return Sampling(
            max_tokens=min(params.max_tokens or room, room),
            temperature=params.temperature,
            seed=seed,
            stop=tuple(stop for stop in stops if isinstance(stop, str)),
            stop_ids=tuple(stop for stop in stops if isinstance(stop, int)),
            top_logprobs=request.topk_sample_logprobs,
            extra=extra,
        )

    async def _sample_of(self, prompt: TokenIds, turn: Turn, request: SampleRequest, adapter: str) -> wire.WireSample:
        """Return a turn as a sample; greedy tokens, which have no logprobs, get logprobs of temperature 1."""
        token_ids, logprobs, top = np.asarray(turn.token_ids, np.int32), turn.logprobs, None
        k = request.topk_sample_logprobs
        if len(token_ids) and (k or not np.isfinite(logprobs).all()):
            scores = await self._engines.score(prompt, token_ids, top_k=k, adapter=adapter)
            logprobs = np.where(np.isfinite(logprobs), logprobs, scores.logprobs)
            top = (scores.top_ids, scores.top_logprobs) if k else None
        return wire.WireSample(
            token_ids=token_ids,
            logprobs=np.asarray(logprobs, np.float32),
            is_stopped=not turn.truncated,
            top=top,
        )
