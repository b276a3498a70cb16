"""The models of a run, and their uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forge_rl.services.teachers_config import TeachersConfig
from forge_rl.services.trainer_config import CriticConfig


@dataclass(frozen=True, kw_only=True)
class RunModels:
    """The policy's model, and the models next to it."""

    policy: Path
    """Hugging Face folder."""
    reference: bool = False
    """Whether the trainer keeps a frozen copy."""
    values: bool = False
    """Whether the trainer has a value model in place of a policy."""
    critic: CriticConfig | None = None
    """Settings of a critic, whose model is a folder or the policy's; it shares the trainer's GPUs."""
    teachers: TeachersConfig | None = None
    """Settings of the teachers, which have GPUs of their own."""
    teacher_folders: Mapping[str, Path] = field(default_factory=dict)
    """Hugging Face folder of each teacher with engines of its own, by the name of its model."""

    @property
    def critic_folder(self) -> Path:
        """Hugging Face folder that the critic starts from."""
        return Path(self.critic.model) if self.critic is not None and self.critic.model else self.policy
