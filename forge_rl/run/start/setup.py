"""The objects that a run is started with, besides its settings: loss, tasks, and how episodes are generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_rl.algorithms.protocol import Loss
from forge_rl.data.mixture import Mixture
from forge_rl.envs.protocol import AgentEnvironment, EnvFactory
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ConfigError
from forge_rl.flags.user_code import code_files
from forge_rl.rewards.peers import as_reward
from forge_rl.rollout.agent_runner import Agent, AgentGateway
from forge_rl.rollout.examples import ExampleFn
from forge_rl.services.reward import RewardFunction, parts_of
from forge_rl.services.teachers_config import TEACHER_COLUMNS, TeachersConfig
from forge_rl.services.trainer_config import CriticConfig
from forge_rl.types import Task


@dataclass(frozen=True, kw_only=True)
class AgentPlayer:
    """An agent that plays episodes, calling the policy through a gateway."""

    agent: Agent | str
    """Function that plays an episode. A string, MODULE:FUNCTION or FILE.py:FUNCTION, names one that runs in its own
    process."""
    gateway: AgentGateway | None = None
    """Settings of the gateway; None for the defaults."""
    environment: AgentEnvironment | None = None
    """Environment that the agent belongs to, if any: its processes run as long as the run."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The file of an agent that is named by a text."""
        return code_files(self.agent) if isinstance(self.agent, str) else ()


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """How episodes are generated and scored.

        Rollouts(reward=build_reward(["auto"]), player=build_environment("tools"))

    Raises:
        ConfigError: the environment would run the code that the reward scores.
    """

    reward: RewardFunction
    """Scores episodes; see `rewards/protocol.py`."""
    player: EnvFactory | AgentPlayer = SingleTurn
    """Creates each episode's environment, or is an agent; by default the model answers once."""
    teachers: TeachersConfig | None = None
    """Settings of teachers that score the policy's tokens, for distillation: `Run.teachers`."""

    def __post_init__(self) -> None:
        # Functions written for TRL or verl are wrapped here, once for everything that scores with them.
        object.__setattr__(self, "reward", as_reward(self.reward))
        # A block of Python would be a tool call and the answer at once.
        scores_code = any(getattr(part, "scores_code", False) for part in parts_of(self.reward).values())
        if scores_code and getattr(self.world, "runs_blocks", False):
            raise ConfigError(
                "the environment runs each block of Python as a tool, and the reward scores blocks of Python",
                hint="set --env python:tool=true, or leave --env out: the reward runs the code",
            )

    @classmethod
    def played_by(
        cls,
        environment: AgentEnvironment,
        *,
        gateway: AgentGateway | None = None,
        teachers: TeachersConfig | None = None,
    ) -> Rollouts:
        """Return the rollouts of an environment that plays and scores whole episodes itself."""
        player = AgentPlayer(agent=environment.agent, gateway=gateway, environment=environment)
        return cls(reward=environment.reward, player=player, teachers=teachers)

    @property
    def world(self) -> EnvFactory | AgentEnvironment | None:
        """The environment; None if an agent without one plays."""
        return self.player.environment if isinstance(self.player, AgentPlayer) else self.player

    @property
    def environment(self) -> EnvFactory | None:
        """The environments that the run itself plays episodes in; None if an agent plays them."""
        return None if isinstance(self.player, AgentPlayer) else self.player

    @property
    def uses_tools(self) -> bool:
        """Whether the model may be shown tools."""
        return self.world is not None and self.world is not SingleTurn

    @property
    def shows_tools(self) -> bool:
        """Whether the environment or an agent may show tools to the model, even if no task has any."""
        return isinstance(self.player, AgentPlayer) or self.uses_tools


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """What a run trains on, with which loss and tasks; made by `start_rollouts`, `start_examples` and `start`.

    Raises:
        ConfigError: the loss learns from something that the run does not have.
    """

    loss: Loss
    """Determines whether the trainer keeps a frozen reference, or has a value model."""
    mixture: Mixture
    rollouts: Rollouts | None
    """How episodes are generated: to train on, or with `examples` to evaluate; None evaluates by the loss alone."""
    examples: ExampleFn | None = None
    """Makes examples of the tasks to train on, instead of generating episodes."""
    evaluation: Mapping[str, Sequence[Task]] | None = None
    """Sets of tasks to evaluate on, by name; None for the mixture's own."""
    critic: CriticConfig | None = None

    def __post_init__(self) -> None:
        taught = [name for name in self.loss.columns if name in TEACHER_COLUMNS]
        if taught and self.teachers is None:
            raise ConfigError(
                f"--loss has one that learns from a teacher's tokens ({', '.join(taught)}), as distill does, "
                "and the run has no teachers",
                hint="train with python -m recipes.distill --teachers.models MODEL, or choose another --loss",
            )
        if self.examples is None and "values" in self.loss.needs:
            raise ConfigError(
                f"--loss {type(self.loss).__name__} trains a value model, which generates no episodes",
                hint="choose a loss of a policy, such as --loss clipped; recipes.ppo trains a critic as well",
            )

    @property
    def teachers(self) -> TeachersConfig | None:
        """Settings of the teachers, if there are any."""
        return self.rollouts.teachers if self.rollouts is not None else None

    @property
    def uses_tools(self) -> bool:
        """Whether the model is trained with tools that it may be shown."""
        return self.examples is None and self.rollouts is not None and self.rollouts.uses_tools

    @property
    def rewards(self) -> Mapping[str, RewardFunction]:
        """The parts of the reward, by name; none without one."""
        return parts_of(self.rollouts.reward) if self.rollouts is not None else {}
