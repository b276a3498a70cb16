"""Teachers: models that score the policy's tokens, one for all sources or one for each, on engines of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tyro

from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.context import positions
from forge_rl.engines.devices import device_type, gpus
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.errors import ConfigError, ContextError, ForgeError, ServiceError, check_flags
from forge_rl.flags.texts import parse, suggest
from forge_rl.models.resolve import resolve_model
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.supervision import Restart
from forge_rl.runtime.tasks import task_group
from forge_rl.services.generator import Generator
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.weight_store import WeightStore
from forge_rl.token_arrays import ScoredTokens
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Batch, Episode

POLICY = "policy"
"""Name of the teacher that is the policy itself, on its own engines."""

TeacherTexts: TypeAlias = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        help="Teacher: a bundled model, a folder, a hub id, or policy for the policy itself. With SOURCE= before it, "
        "the teacher of a source's episodes; one without SOURCE is for all others.",
    ),
]
"""Type of a field of texts for `build_teachers`."""
Prompts: TypeAlias = Sequence[Sequence[Sequence[int] | None]]
"""What the teacher is shown in place of each episode's first prompt, [P][G] token ids; None to not score an episode."""


@dataclass(frozen=True, kw_only=True)
class TeachersConfig(DecodeSettings):
    """The engines of each teacher."""

    replicas: int = 1
    """Number of engines of each teacher, on GPUs of their own."""
    max_model_len: int = 0
    """Maximum tokens that are scored at a time, plus one. 0: as the policy's engines need, with a quarter for hints."""
    gpu_memory_utilization: float = 0.8
    """Share of a GPU's memory that an engine may take. Logits of scored prompts come on top of that."""
    request_deadline_s: float = 600.0
    """Timeout of one episode's scores."""
    restart: Restart = field(default_factory=Restart)
    """Policy for engines that die."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "--teachers.",
            least={"replicas": 1, "max_model_len": 0},
            above={"gpu_memory_utilization": 0, "kv_cache_gib": 0, "request_deadline_s": 0, "stall_s": 0},
            below={"gpu_memory_utilization": 1},
        )


@dataclass(frozen=True, kw_only=True)
class TeacherModels:
    """The teacher of each source, by the name of its model; "" is for all other sources."""

    models: Mapping[str, str]
    config: TeachersConfig = field(default_factory=TeachersConfig)

    def check_sources(self, sources: Collection[str]) -> None:
        """Check that each of a mixture's sources has a teacher, and each teacher a source.

        Raises:
            ConfigError: it has not.
        """
        for name in (name for name in self.models if name and name not in sources):
            raise ConfigError(
                f"--teacher {name}=...: no source is called {name}", hint=suggest(name, sources, "sources")
            )
        for name in (name for name in sources if not {name, ""} & self.models.keys()):
            raise ConfigError(
                f"the source {name} has no teacher", hint=f"add --teacher {name}=..., or one without a source"
            )


def build_teachers(texts: Sequence[str], config: TeachersConfig | None = None) -> TeacherModels:
    """Read which model teaches which source.

        build_teachers(["big-model"])
        build_teachers(["math=Qwen/Qwen3-8B", "policy"], TeachersConfig(replicas=2))

    Raises:
        ConfigError: a text is malformed, two are for the same source, or there is none.
    """
    models: dict[str, str] = {}
    for text in texts:
        parsed = parse(text, "--teacher", takes_weight=False)
        if parsed.params:
            raise parsed.wrong("a teacher takes no options", "set --teachers", at=next(iter(parsed.params)))
        if parsed.title in models:
            raise parsed.wrong("this source already has a teacher", "name each source once, as SOURCE=MODEL")
        models[parsed.title] = parsed.name
    if not models:
        raise ConfigError("no teacher is given", hint="set --teacher to a model, or to policy")
    return TeacherModels(models=models, config=config or TeachersConfig())


@dataclass(frozen=True, kw_only=True)
class TeacherScores:
    """A teacher's scores of a batch, [P][G] arrays with an entry for each token that the episode generated."""

    logprobs: Sequence[Sequence[npt.NDArray[np.float32]]]
    """[T] each; NaN for tokens that were not scored."""
    top_ids: Sequence[Sequence[npt.NDArray[np.int32]]]
    """[T, k] each, the teacher's most likely tokens."""
    top_logprobs: Sequence[Sequence[npt.NDArray[np.float32]]]
    """[T, k] each; NaN where the token was not scored."""
    failed: int
    """Number of episodes whose scores failed; they are not trained on."""
    unhinted: int
    """Number of episodes that have no hint, and were not scored."""
    problem: str = ""
    """Cause of the first failure."""

    def columns(self, loss: Loss) -> dict[str, Sequence[Sequence[npt.NDArray[Any]]]]:
        """Return those columns for `pack` that the loss declares: "teacher", "top_ids" and "top_teacher"."""
        given: dict[str, Sequence[Sequence[npt.NDArray[Any]]]] = {
            "teacher": self.logprobs,
            "top_ids": self.top_ids,
            "top_teacher": self.top_logprobs,
        }
        return {name: given[name] for name in loss.columns if name in given}

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return "teacher/failed" and "teacher/unhinted", episodes, and "teacher/kl", the mean difference of the
        logprobs of policy and teacher: an estimate of KL(policy || teacher) at a token, absent if none was scored."""
        found = {"teacher/failed": float(self.failed), "teacher/unhinted": float(self.unhinted)}
        policy = [turn.logprobs for episode in batch.episodes for turn in episode.turns]
        if policy:
            gaps = np.concatenate(policy).astype(np.float64) - np.concatenate([e for row in self.logprobs for e in row])
            if (known := np.isfinite(gaps)).any():
                found["teacher/kl"] = float(gaps[known].mean())
        return found


class Teachers:
    """Typed handle of all teachers of a run.

        scores = await run.teachers.score(batch, temperature=1.0, top_k=20)
        advantages = teacher_advantages(batch, scores.logprobs)

    A teacher's engine that dies is replaced, and others score meanwhile. An episode that cannot be scored is left out
    of training and counted; the run ends only if all of a batch fail.

    Args:
        policy: the policy's generator, the teacher of sources whose model is "policy".
        models: teacher of each source, by name of its model.
        generators: generators of the other models, by name.
    """

    Config: TypeAlias = TeachersConfig

    def __init__(self, policy: Generator, models: Mapping[str, str], generators: Mapping[str, Generator]) -> None:
        self.models = models
        self.generators = generators
        self._policy = policy

    @classmethod
    async def start(
        cls,
        models: TeacherModels,
        cluster: Cluster,
        faults: Faults,
        *,
        policy: asyncio.Future[Generator],
        model: Path,
        cache: Path,
        settings: GeneratorConfig,
        seed: int,
        deadline_s: float,
        first_gpu: int,
    ) -> Teachers:
        """Start the engines of all teachers but the policy; they serve the weights of their folders.

        Args:
            policy: done with the policy's generator once that has started.
            model: the policy's folder, whose tokenizer the teachers must have.
            settings: settings of the policy's engines.
            first_gpu: index of the first GPU that is free.

        Raises:
            ConfigError: a teacher has another tokenizer, or there are too few GPUs.
            ModelError: a teacher's model is not found, or cannot be served.
        """
        names = sorted({name for name in models.models.values() if name != POLICY})
        folders = {name: (await asyncio.to_thread(resolve_model, name, cache)).resolve() for name in names}
        devices = models.config.replicas * models.config.devices
        if device_type() == "cuda" and (needed := first_gpu + devices * len(names)) > gpus():
            raise ConfigError(
                f"with {len(names)} teachers on {devices} GPUs each, the run needs {needed} GPUs, and there are "
                f"{gpus()}",
                hint="lower --teachers.replicas, or choose --placement colocated for trainer and policy",
            )
        for name, folder in folders.items():
            await asyncio.to_thread(check_same_tokens, name, folder, model)
        async with task_group() as group:
            starting = {
                name: group.create_task(
                    Generator.start(
                        _engine_settings(models.config, settings, folder),
                        cluster,
                        faults,
                        model=folder,
                        seed=seed,
                        deadline_s=deadline_s,
                        first_gpu=first_gpu + devices * number,
                        name="teacher" if len(folders) == 1 else f"teacher-{number}",
                    )
                )
                for number, (name, folder) in enumerate(folders.items())
            }
        generators = {name: task.result() for name, task in starting.items()}
        teachers = cls(await policy, models.models, generators)
        for generator in generators.values():
            await generator.serve_model()
        return teachers

    def of(self, source: str) -> Generator:
        """Return the generator of a source's teacher."""
        name = self.models.get(source, self.models.get("", POLICY))
        return self._policy if name == POLICY else self.generators[name]

    async def score(
        self, batch: Batch, *, temperature: float, top_k: int = 0, prompts: Prompts | None = None
    ) -> TeacherScores:
        """Score all tokens that the policy generated, each episode by its source's teacher.

        Args:
            temperature: of the rollout.
            top_k: k, number of most likely tokens for each token.
            prompts: what teachers are shown in place of the first prompt; by default what the policy was shown.

        Raises:
            ForgeError: all episodes failed.
        """
        rooms: dict[int, asyncio.Semaphore] = {}

        async def one(p: int, g: int, episode: Episode) -> _Scored:
            teacher = self.of(episode.task.source)
            most = teacher.config.max_num_seqs * teacher.config.replicas
            async with rooms.setdefault(id(teacher), asyncio.Semaphore(most)):
                prompt = prompts[p][g] if prompts is not None else None
                return await _score(teacher, episode, prompt, temperature, top_k)

        shape = [(p, g) for p, group in enumerate(batch.groups) for g in range(len(group.episodes))]
        wanted = [(p, g) for p, g in shape if prompts is None or prompts[p][g] is not None]
        errors: list[ForgeError] = []
        found: dict[tuple[int, int], _Scored] = {}

        async def into(p: int, g: int) -> None:
            try:
                found[p, g] = await one(p, g, batch.groups[p].episodes[g])
            except (ServiceError, ConfigError, ContextError) as error:
                errors.append(error)

        async with task_group() as group:
            for p, g in wanted:
                group.create_task(into(p, g))
        if errors and not found:
            raise errors[0]
        vocab = self._policy.tokenizer.vocab_size
        rows = [
            [
                found[p, g].within(vocab) if (p, g) in found else _Scored.empty(episode, top_k)
                for g, episode in enumerate(one_group.episodes)
            ]
            for p, one_group in enumerate(batch.groups)
        ]
        return TeacherScores(
            logprobs=[[each.logprobs for each in row] for row in rows],
            top_ids=[[each.top_ids for each in row] for row in rows],
            top_logprobs=[[each.top_logprobs for each in row] for row in rows],
            failed=len(errors),
            unhinted=len(shape) - len(wanted),
            problem=str(errors[0]) if errors else "",
        )

    async def load(self, store: WeightStore) -> None:
        """Load the latest version of the policy into all teachers, which then are older versions of it.

        Raises:
            WeightsError: a teacher has another architecture.
        """
        async with task_group() as group:
            for generator in self.generators.values():
                group.create_task(generator.load(store))

    async def stop(self) -> None:
        """Stop the engines."""
        await asyncio.gather(*(generator.stop() for generator in self.generators.values()))

    def __repr__(self) -> str:
        return "Teachers  " + ", ".join(f"{source or 'all'}: {name}" for source, name in self.models.items())


def check_same_tokens(name: str, folder: Path, policy: Path) -> None:
    """Check that a teacher's tokenizer has the same token for each id as the policy's.

    Raises:
        ConfigError: it has not.
    """
    teachers, policys = (Tokenizer(each).hf.get_vocab() for each in (folder, policy))
    if teachers != policys:
        differ = sorted(token for token, _ in teachers.items() ^ policys.items())
        token = differ[0]
        raise ConfigError(
            f"the teacher {name} has another tokenizer than the policy: {len(set(differ))} tokens differ, such as "
            f"{token!r}, which is {teachers.get(token, 'none')} there and {policys.get(token, 'none')} in the policy",
            hint="choose a teacher of the policy's own family; logprobs of other tokens cannot be compared",
        )


def _engine_settings(config: TeachersConfig, policy: GeneratorConfig, folder: Path) -> GeneratorConfig:
    """Return the settings of a teacher's engines as a generator has them."""
    longest = config.max_model_len
    if not longest:
        longest = min(policy.max_model_len + policy.max_model_len // 4 + 1, positions(read_architecture(folder)))
    own = {each.name: getattr(config, each.name) for each in fields(TeachersConfig)}
    return replace(policy, **own | {"max_model_len": longest, "max_tokens": 1, "routed_experts": False})


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """The scores of an episode, [T] and [T, k]."""

    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]

    @classmethod
    def empty(cls, episode: Episode, top_k: int) -> _Scored:
        count = episode.response_tokens
        return cls(
            logprobs=np.full(count, np.nan, np.float32),
            top_ids=np.zeros((count, top_k), np.int32),
            top_logprobs=np.full((count, top_k), np.nan, np.float32),
        )

    def put(self, rows: slice, scored: ScoredTokens, chosen: npt.NDArray[np.bool_]) -> None:
        """Take the chosen tokens' scores as those of `rows`."""
        self.logprobs[rows] = scored.logprobs[chosen]
        self.top_ids[rows] = scored.top_ids[chosen]
        self.top_logprobs[rows] = scored.top_logprobs[chosen]

    def within(self, vocab_size: int) -> _Scored:
        """Leave out tokens in whose place the teacher has ids that the policy lacks: rows that pad its vocabulary."""
        beyond = (self.top_ids >= vocab_size).any(axis=1)
        self.top_ids[beyond], self.top_logprobs[beyond] = 0, np.nan
        return self


async def _score(
    teacher: Generator, episode: Episode, prompt: Sequence[int] | None, temperature: float, top_k: int
) -> _Scored:
    """Score an episode's tokens, segment by segment.

    With a prompt, it replaces the episode's first prompt; segments that do not begin with that are not scored.
    """
    found = _Scored.empty(episode, top_k)
    ends = np.cumsum([len(turn.token_ids) for turn in episode.turns])
    first = episode.turns[0].prompt_ids if episode.turns else ()
    for segment in episode.segments:
        if not segment.trained.any():
            continue
        at = int(segment.trained.argmax())
        shown, ids = segment.token_ids[:at], segment.token_ids[at:]
        if prompt is not None:
            if not np.array_equal(shown[: len(first)], first):
                continue
            shown = np.concatenate([np.asarray(prompt, np.int32), shown[len(first) :]])
        scored = await teacher.score(shown, ids, temperature=temperature, top_k=top_k)
        turns = segment.turns[at:]
        for turn in np.unique(segment.turns[segment.trained]):
            rows = slice(ends[turn] - len(episode.turns[turn].token_ids), ends[turn])
            found.put(rows, scored, turns == turn)
    return found
