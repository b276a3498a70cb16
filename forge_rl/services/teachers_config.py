"""Settings of the teachers service: which model scores which source's episodes, and the engines that serve it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, TypeAlias

import tyro

from forge_rl.engines.protocol import DecodeSettings
from forge_rl.errors import ConfigError, check_flags
from forge_rl.flags.categories import Operational
from forge_rl.flags.fields import changed_flags
from forge_rl.flags.texts import parse, suggest
from forge_rl.runtime.supervision import Restart

POLICY = "policy"
"""Name of the teacher that is the policy itself, on its own engines."""
TEACHER_COLUMNS = ("teacher", "top_ids", "top_teacher")
"""Columns of a loss that hold a teacher's scores; see `teachers.TeacherScores.columns`."""

TeacherTexts: TypeAlias = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        help="Teachers, as [SOURCE=]MODEL: a bundled model, a folder, a hub id, or policy for the policy itself. One "
        "without SOURCE is for the episodes of all other sources.",
    ),
]
"""Type of `TeachersConfig.models`."""


@dataclass(frozen=True, kw_only=True)
class TeachersConfig(DecodeSettings):
    """Settings of the teachers: models that score the policy's tokens, on engines of their own.

    TeachersConfig(models=("math=Qwen/Qwen3-8B", "policy"))
    """

    models: TeacherTexts = ()
    """Teachers, as [SOURCE=]MODEL: a bundled model, a folder, a hub id, or policy for the policy itself. One without
    SOURCE is for the episodes of all other sources."""
    replicas: Operational[int] = 1
    """Number of engines of each model, on GPUs of their own."""
    max_model_len: int = 0
    """Maximum tokens that are scored at a time, plus one. 0: as the policy's engines need, with a quarter for hints."""
    routed_experts: Annotated[bool, tyro.conf.Fixed, tyro.conf.Suppress] = field(default=False, repr=False)
    """No flag: what a teacher's tokens are routed to is of no use."""
    speculation: Annotated[str, tyro.conf.Fixed, tyro.conf.Suppress] = field(default="off", repr=False)
    """No flag: a teacher samples nothing that could be drafted."""
    kv_transfer_config: Annotated[str, tyro.conf.Fixed, tyro.conf.Suppress] = field(default="", repr=False)
    """No flag: a score reads no keys and values of earlier requests."""
    max_loras: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = field(default=0, repr=False)
    """No flag: a teacher is a whole model."""
    max_lora_rank: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = field(default=16, repr=False)
    """No flag, as above."""
    max_num_seqs: int = 16
    """Maximum episodes that an engine scores at a time; further ones wait."""
    gpu_memory_utilization: float = 0.8
    """Share of a GPU's memory that an engine may take. Logits of scored prompts come on top of that."""
    restart: Restart = field(default_factory=Restart)
    """Policy for engines that die."""

    def __post_init__(self) -> None:
        counts = ("replicas", "max_num_seqs", "tensor_parallel_size", "data_parallel_size")
        check_flags(
            self,
            "--teachers.",
            minimum=dict.fromkeys(counts, 1) | {"max_model_len": 0},
            above={"gpu_memory_utilization": 0, "kv_cache_gib": 0, "stall_s": 0},
            below={"gpu_memory_utilization": 1},
        )
        _ = self.by_source

    @property
    def by_source(self) -> dict[str, str]:
        """Name of each source's model; "" is for all other sources.

        Raises:
            ConfigError: a text is malformed, or two are for the same source.
        """
        models: dict[str, str] = {}
        for text in self.models:
            parsed = parse(text, "--teachers.models", takes_weight=False)
            if parsed.params:
                raise parsed.wrong("a teacher takes no options", "write [SOURCE=]MODEL", key=next(iter(parsed.params)))
            if parsed.title in models:
                raise parsed.wrong("this source already has a teacher", "name each source once, as SOURCE=MODEL")
            models[parsed.title] = parsed.name
        return models

    @property
    def names(self) -> list[str]:
        """Names of the models that need engines of their own: all but the policy."""
        return sorted({name for name in self.by_source.values() if name != POLICY})

    def check_sources(self, sources: Collection[str]) -> None:
        """Check that each of a mixture's sources has a teacher, and each teacher a source.

        Raises:
            ConfigError: it has not, or a setting of engines has none to act on.
        """
        models = self.by_source
        if not models:
            raise ConfigError("no teacher is given", hint="set --teachers.models to a model, or to policy")
        engine_fields = [field.name for field in fields(self) if field.name != "models"]
        if not self.names and (changed := changed_flags(self, engine_fields)):
            flag = changed[0].replace("--", "--teachers.")
            raise ConfigError(
                f"{flag} is of teachers' engines, and the policy, the only teacher, scores on its own",
                hint="leave it out, or name a model with --teachers.models",
            )
        for name in (name for name in models if name and name not in sources):
            raise ConfigError(
                f"--teachers.models {name}=...: no source is called {name}", hint=suggest(name, sources, "sources")
            )
        for name in (name for name in sources if not {name, ""} & models.keys()):
            raise ConfigError(
                f"the source {name} has no teacher",
                hint=f"add {name}=MODEL to --teachers.models, or a model without a source for all others",
            )


@contextlib.contextmanager
def as_teachers() -> Iterator[None]:
    """Have errors of an engine's settings name the teachers' flags."""
    try:
        yield
    except ConfigError as error:
        message, hint = (text.replace("--generator.", "--teachers.") for text in (error.message, error.hint))
        raise ConfigError(message, hint=hint) from None
