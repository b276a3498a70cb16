"""Teachers: models that score the policy's tokens, one for all sources or one for each, on engines of their own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from forge_rl.algorithms.hints import Hint, HintOf, hint_of, with_hint
from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.context import positions
from forge_rl.errors import ConfigError, ContextError, ForgeError, ModelError, ServiceError
from forge_rl.models.cache import Progress
from forge_rl.models.dequantized import dequantized
from forge_rl.models.resolve import resolve_model
from forge_rl.runtime.seats import ServiceHosts
from forge_rl.services.generator import Generator
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.service_start import ServiceStart
from forge_rl.services.teachers_config import POLICY, TeachersConfig
from forge_rl.system.tasks import task_group
from forge_rl.token_arrays import ScoredTokens, TokenIds
from forge_rl.tokens.same_tokens import check_same_tokens
from forge_rl.types import Batch, Episode


@dataclass(frozen=True, kw_only=True)
class TeacherScores:
    """The teachers' scores of a batch: [P][G] arrays with an entry for each token that the episode generated."""

    logprobs: Sequence[Sequence[npt.NDArray[np.float32]]]
    """[T] each; NaN for tokens without a finite one."""
    top_ids: Sequence[Sequence[npt.NDArray[np.int32]]]
    """[T, k] each, the teacher's most likely tokens."""
    top_logprobs: Sequence[Sequence[npt.NDArray[np.float32]]]
    """[T, k] each; NaN where the token was not scored."""
    unscored: int
    """Number of tokens without a finite logprob, in episodes that were scored."""
    failed: int
    """Number of episodes whose scores failed; they are not trained on."""
    unhinted: int
    """Number of episodes without a hint; they are not trained on."""

    def columns(self, loss: Loss) -> dict[str, Sequence[Sequence[npt.NDArray[Any]]]]:
        """Return the columns for `pack` that the loss declares, of "teacher", "top_ids" and "top_teacher"."""
        columns: dict[str, Sequence[Sequence[npt.NDArray[Any]]]] = {
            "teacher": self.logprobs,
            "top_ids": self.top_ids,
            "top_teacher": self.top_logprobs,
        }
        return {name: columns[name] for name in loss.columns if name in columns}

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return "teacher/kl" and, with several sources, "teacher/kl/SOURCE": the mean of the policy's logprob minus
        the teacher's, an estimate of KL(policy || teacher) at a token; absent without scores. And the counts
        "teacher/unscored", tokens, and "teacher/failed" and "teacher/unhinted", episodes."""
        gaps: dict[str, list[npt.NDArray[np.float64]]] = defaultdict(list)
        for group, row in zip(batch.groups, self.logprobs, strict=True):
            for episode, teacher_logprobs in zip(group.episodes, row, strict=True):
                gap = _logprobs(episode).astype(np.float64) - teacher_logprobs
                for name in ("teacher/kl", f"teacher/kl/{group.task.source}"):
                    gaps[name].append(gap[np.isfinite(gap)])
        # With a single source, its KL is the overall one.
        if len(gaps) == 2:
            del gaps[f"teacher/kl/{batch.groups[0].task.source}"]
        token_gaps = {name: np.concatenate(arrays) for name, arrays in gaps.items()}
        counts = {"unscored": self.unscored, "failed": self.failed, "unhinted": self.unhinted}
        return {name: float(array.mean()) for name, array in token_gaps.items() if len(array)} | {
            f"teacher/{name}": float(count) for name, count in counts.items()
        }


class Teachers:
    """Typed handle of all teachers of a run.

        scores = await run.teachers.score(batch, temperature=1.0, top_k=20)
        advantages = teacher_advantages(batch, scores.logprobs)

    A teacher's engine that dies is replaced; meanwhile others score, or its requests wait. An episode that cannot be
    scored is left out of training and counted.

    Args:
        models: name of each source's model; "" is for all other sources.
        policy: the policy's generator, the teacher of sources whose model is "policy".
        generators: generators of the other models, by name.
        warn: warns the user of episodes that could not be scored.
    """

    Config: TypeAlias = TeachersConfig

    def __init__(
        self,
        models: Mapping[str, str],
        policy: Generator,
        generators: Mapping[str, Generator],
        warn: Callable[[str], None],
    ) -> None:
        self.models = models
        self.generators = generators
        self._policy = policy
        self._tokenizer = policy.tokenizer
        self._warn = warn

    @classmethod
    async def start(
        cls,
        config: Config,
        folders: Mapping[str, Path],
        start: ServiceStart,
        *,
        policy: asyncio.Task[Generator],
        settings: GeneratorConfig,
        seed: int,
        warn: Callable[[str], None],
    ) -> Teachers:
        """Start the engines of all teachers but the policy; they serve the weights of their folders.

        Args:
            folders: Hugging Face folder of each of `config.names`.
            start: where to start; its hosts list the free GPUs.
            policy: starts the policy's generator.
            settings: settings of the policy's engines.

        Raises:
            ForgeError: a teacher did not start; the others are stopped.
        """
        hosts = start.hosts or ServiceHosts()
        # GPUs that one teacher takes of each host, if its engines are spread evenly.
        devices = -(-config.replicas // len(hosts.names)) * config.devices
        generators: dict[str, Generator] = {}

        async def start_one(number: int, name: str, folder: Path) -> None:
            # Teachers share no GPUs: each takes the next ones of every host.
            place = replace(
                start,
                hosts=_part_of(hosts, number, devices),
                name="teacher" if len(folders) == 1 else f"teacher-{number}",
            )
            teacher_settings = engine_settings(config, settings, folder)
            generators[name] = await Generator.start(teacher_settings, place, model=folder, seed=seed)
            # A teacher's weights never change: they are version 0.
            await generators[name].serve_model()

        try:
            async with task_group() as group:
                for number, (name, folder) in enumerate(folders.items()):
                    group.create_task(start_one(number, name, folder))
            return cls(config.by_source, await policy, generators, warn)
        except BaseException:
            stops = (generator.stop() for generator in generators.values())
            await asyncio.gather(*stops, return_exceptions=True)  # what failed first is raised
            raise

    def of(self, source: str) -> Generator:
        """Return the generator of a source's teacher."""
        name = self.models[source if source in self.models else ""]
        return self._policy if name == POLICY else self.generators[name]

    async def score(
        self, batch: Batch, *, temperature: float, top_k: int = 0, hint: Hint | HintOf = "none"
    ) -> TeacherScores:
        """Score all tokens that the policy generated, each episode by its source's teacher.

        With a hint, teachers are shown it below the task's messages, in place of what the policy was shown: the policy
        itself as such a teacher is self-distillation. Episodes without a hint are not scored, nor are turns after the
        agent rewrote its history.

        Args:
            temperature: the rollout's; logits are divided by it.
            top_k: k, number of most likely tokens for each token.
            hint: see `hint_of`, or a function like it.

        Raises:
            ServiceError: all episodes failed, or no token has a finite logprob.
            ConfigError: no task has a solution or demonstration, or the episodes do not begin with their tasks'
                messages, so a hint cannot be added.
        """
        places = [(p, g) for p, group in enumerate(batch.groups) for g in range(len(group.episodes))]
        # None stands for the episode's own prompt.
        prompts: dict[tuple[int, int], TokenIds | None] = dict.fromkeys(places)
        if hint != "none":
            prompts = dict(await asyncio.to_thread(self._hinted, batch, hint))
        errors: list[ForgeError] = []
        scores_by_place: dict[tuple[int, int], _EpisodeScores] = {}
        rooms: dict[Generator, asyncio.Semaphore] = {}

        async def score_episode(place: tuple[int, int], teacher: Generator, episode: Episode) -> None:
            max_requests = teacher.config.max_num_seqs * teacher.config.data_parallel_size * teacher.config.engines
            async with rooms.setdefault(teacher, asyncio.Semaphore(max_requests)):
                try:
                    scores = await _score(teacher, episode, prompts[place], temperature, top_k)
                except (ServiceError, ConfigError, ContextError) as error:
                    # An episode that an engine cannot score is left out; any other error is a bug and ends the step.
                    errors.append(error)
                else:
                    scores_by_place[place] = scores.cleaned(self._tokenizer.vocab_size)

        async with task_group() as group:
            for p, g in prompts:
                episode = batch.groups[p].episodes[g]
                group.create_task(score_episode((p, g), self.of(episode.task.source), episode))
        if errors and not scores_by_place:
            raise errors[0]
        if errors:
            self._warn(f"{len(errors)} of {len(prompts)} episodes were not scored by their teacher: {errors[0]}")
        unscored = _unscored(scores_by_place.values())
        # Episodes without scores get NaN, which keeps their tokens out of training.
        rows = [
            [
                scores_by_place.get((p, g)) or _EpisodeScores.empty(episode, top_k)
                for g, episode in enumerate(group.episodes)
            ]
            for p, group in enumerate(batch.groups)
        ]
        return TeacherScores(
            logprobs=[[scores.logprobs for scores in row] for row in rows],
            top_ids=[[scores.top_ids for scores in row] for row in rows],
            top_logprobs=[[scores.top_logprobs for scores in row] for row in rows],
            unscored=unscored,
            failed=len(errors),
            unhinted=len(places) - len(prompts),
        )

    def _hinted(self, batch: Batch, hint: Hint | HintOf) -> list[tuple[tuple[int, int], TokenIds]]:
        """Return the prompt that teachers see in place of each episode's first one; episodes without a hint are left
        out."""
        prompts: list[tuple[tuple[int, int], TokenIds]] = []
        num_hinted = num_mismatched = 0
        for group_index, group in enumerate(batch.groups):
            task = group.task
            prompt_ids = self._tokenizer.render(task.messages, tools=task.tools)
            for episode_index, episode in enumerate(group.episodes):
                text = hint(group, episode_index) if callable(hint) else hint_of(group, episode_index, hint)
                messages = with_hint(task.messages, text) if text else None
                if messages is None or not episode.turns:
                    continue
                num_hinted += 1
                # The hint is added to the task's messages, so it fits only an episode that began with exactly these.
                if np.array_equal(episode.turns[0].prompt_ids, prompt_ids):
                    prompts.append(((group_index, episode_index), self._tokenizer.render(messages, tools=task.tools)))
                else:
                    num_mismatched += 1
        if not num_hinted and hint in ("solution", "demonstration"):
            raise ConfigError(f"no task of the batch has a {hint}", hint=f"give tasks a {hint}, or change --hint")
        if num_hinted and num_mismatched == num_hinted:
            raise ConfigError(
                "no hint can be added to a task, as the environment or the agent shows other messages than the task's",
                hint="use teachers without a hint, or an environment that begins with the task's messages",
            )
        return prompts

    async def stop(self) -> None:
        """Stop the engines."""
        await asyncio.gather(*(generator.stop() for generator in self.generators.values()))

    def __repr__(self) -> str:
        return "Teachers  " + ", ".join(f"{source or 'all'}: {name}" for source, name in self.models.items())


def resolve_teachers(
    config: TeachersConfig, policy: Path, cache: Path, progress: Progress | None = None
) -> dict[str, Path]:
    """Return the Hugging Face folder of each of `config.names`; quantised weights are converted to bfloat16.

    Args:
        policy: the policy's folder, whose tokenizer the teachers must have.
        cache, progress: as for `resolve_model`.

    Raises:
        ConfigError: a teacher has another tokenizer.
        ModelError: a model is not found, or cannot be served.
    """
    folders: dict[str, Path] = {}
    for name in config.names:
        try:
            folder = resolve_model(name, cache, progress).resolve()
            check_same_tokens(f"the teacher {name}", folder, policy)
            folders[name] = dequantized(folder, cache, progress) if read_architecture(folder).quantized else folder
        except ModelError as error:
            raise ModelError(f"the teacher {name}: {error.message}", hint=error.hint) from error
    return folders


def engine_settings(config: TeachersConfig, policy: GeneratorConfig, folder: Path) -> GeneratorConfig:
    """Return the settings of a teacher's engines as a generator has them.

    Args:
        policy: settings of the policy's engines, which determine the context if it is left open.
        folder: the teacher's Hugging Face folder; only its config.json is read.
    """
    longest = config.max_model_len
    if not longest:
        # A quarter for hints, and one token more than those to score, as engines decode one.
        longest = min(policy.max_model_len + policy.max_model_len // 4 + 1, positions(read_architecture(folder)))
    teacher_settings = {
        field.name: getattr(config, field.name) for field in fields(TeachersConfig) if field.name != "models"
    }
    overrides: dict[str, object] = {"max_model_len": longest, "max_tokens": 1}
    overrides |= dict.fromkeys(("spares", "min_replicas", "max_replicas"), 0) | {"urls": (), "hosts_per_replica": 1}
    return replace(policy, **teacher_settings | overrides)


def _logprobs(episode: Episode) -> npt.NDArray[np.float32]:
    """Return the policy's logprobs of all tokens that an episode generated, [T]."""
    return np.concatenate([turn.logprobs for turn in episode.turns] or [np.zeros(0, np.float32)])


@dataclass(frozen=True, kw_only=True)
class _EpisodeScores:
    """The scores of an episode, [T] and [T, k]."""

    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]

    @classmethod
    def empty(cls, episode: Episode, top_k: int) -> _EpisodeScores:
        count = episode.response_tokens
        return cls(
            logprobs=np.full(count, np.nan, np.float32),
            top_ids=np.zeros((count, top_k), np.int32),
            top_logprobs=np.full((count, top_k), np.nan, np.float32),
        )

    def put(self, rows: slice, scored: ScoredTokens, mask: npt.NDArray[np.bool_]) -> None:
        """Store the chosen tokens' scores in `rows`."""
        self.logprobs[rows] = scored.logprobs[mask]
        self.top_ids[rows] = scored.top_ids[mask]
        self.top_logprobs[rows] = scored.top_logprobs[mask]

    def cleaned(self, vocab_size: int) -> _EpisodeScores:
        """Leave out logprobs that are not finite, and the top tokens at positions where the teacher ranks ids that the
        policy lacks: rows that pad the teacher's vocabulary."""
        self.logprobs[~np.isfinite(self.logprobs)] = np.nan
        has_unknown_ids = (self.top_ids >= vocab_size).any(axis=1)
        self.top_ids[has_unknown_ids], self.top_logprobs[has_unknown_ids] = 0, np.nan
        return self


def _part_of(hosts: ServiceHosts, number: int, gpus: int) -> ServiceHosts:
    """Return the hosts of the teacher with this number, if each teacher takes as many GPUs of each host."""
    return replace(hosts, gpus={host: host_gpus[number * gpus :] for host, host_gpus in hosts.gpus.items()})


def _unscored(episode_scores: Iterable[_EpisodeScores]) -> int:
    """Count tokens without a finite logprob.

    Raises:
        ServiceError: no token has one.
    """
    missing = [np.isnan(scores.logprobs) for scores in episode_scores]
    tokens, unscored = sum(map(len, missing)), sum(int(mask.sum()) for mask in missing)
    if tokens and unscored == tokens:
        message = f"none of {tokens} tokens has a finite logprob under its teacher"
        raise ServiceError(message, service="teacher", hint="check the teacher's weights")
    return unscored


async def _score(
    teacher: Generator, episode: Episode, prompt: TokenIds | None, temperature: float, top_k: int
) -> _EpisodeScores:
    """Score an episode's tokens, segment by segment.

    With a prompt, it replaces the episode's first prompt; segments that do not begin with that are not scored.
    """
    scores = _EpisodeScores.empty(episode, top_k)
    turn_ends = np.cumsum([len(turn.token_ids) for turn in episode.turns])
    first_prompt = episode.turns[0].prompt_ids if episode.turns else ()
    for segment in episode.segments:
        if not segment.trained.any():
            continue
        # Everything from the first trained token on is scored at once; observations between turns come along.
        start = int(segment.trained.argmax())
        prompt_ids, token_ids = segment.token_ids[:start], segment.token_ids[start:]
        if prompt is not None:
            # The agent rewrote its history: the hint has no place in this segment.
            if not np.array_equal(prompt_ids[: len(first_prompt)], first_prompt):
                continue
            prompt_ids = np.concatenate([np.asarray(prompt, np.int32), prompt_ids[len(first_prompt) :]])
        segment_scores = await teacher.score(prompt_ids, token_ids, temperature=temperature, top_k=top_k)
        turns = segment.turns[start:]
        for turn in np.unique(segment.turns[segment.trained]):
            # Place of the turn among all tokens that the episode generated, in the order of its turns.
            rows = slice(turn_ends[turn] - len(episode.turns[turn].token_ids), turn_ends[turn])
            scores.put(rows, segment_scores, turns == turn)
    return scores
