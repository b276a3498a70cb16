"""Reinforcement learning for language models that reason at length and call tools. Importing this starts nothing."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from forge_rl.algorithms.advantages import Estimator as Estimator
    from forge_rl.algorithms.advantages import batch_advantages as batch_advantages
    from forge_rl.algorithms.advantages import check_group_size as check_group_size
    from forge_rl.algorithms.advantages import gdpo_advantages as gdpo_advantages
    from forge_rl.algorithms.advantages import group_advantages as group_advantages
    from forge_rl.algorithms.aggregation import Aggregation as Aggregation
    from forge_rl.algorithms.baselines import RoleBaselines as RoleBaselines
    from forge_rl.algorithms.baselines import remax_advantages as remax_advantages
    from forge_rl.algorithms.components import CrossEntropy as CrossEntropy
    from forge_rl.algorithms.components import Entropy as Entropy
    from forge_rl.algorithms.components import LossBySource as LossBySource
    from forge_rl.algorithms.components import LossSum as LossSum
    from forge_rl.algorithms.correction import Correction as Correction
    from forge_rl.algorithms.distillation import Distillation as Distillation
    from forge_rl.algorithms.distillation import teacher_advantages as teacher_advantages
    from forge_rl.algorithms.entropy import AdaptiveEntropy as AdaptiveEntropy
    from forge_rl.algorithms.gae import GaeConfig as GaeConfig
    from forge_rl.algorithms.gae import gae as gae
    from forge_rl.algorithms.gates import gate_advantages as gate_advantages
    from forge_rl.algorithms.gigpo import gigpo_advantages as gigpo_advantages
    from forge_rl.algorithms.hints import Hint as Hint
    from forge_rl.algorithms.loss_flag import LossTexts as LossTexts
    from forge_rl.algorithms.loss_flag import build_loss as build_loss
    from forge_rl.algorithms.losses import ClippedSurrogate as ClippedSurrogate
    from forge_rl.algorithms.losses import PolicyLoss as PolicyLoss
    from forge_rl.algorithms.minibatch_losses import ClipCov as ClipCov
    from forge_rl.algorithms.minibatch_losses import KlCov as KlCov
    from forge_rl.algorithms.minibatch_losses import M2po as M2po
    from forge_rl.algorithms.pass_at_k import pass_at_k_advantages as pass_at_k_advantages
    from forge_rl.algorithms.policy_losses import Cispo as Cispo
    from forge_rl.algorithms.policy_losses import Dppo as Dppo
    from forge_rl.algorithms.policy_losses import Gmpo as Gmpo
    from forge_rl.algorithms.policy_losses import Gspo as Gspo
    from forge_rl.algorithms.policy_losses import Reinforce as Reinforce
    from forge_rl.algorithms.policy_losses import Sapo as Sapo
    from forge_rl.algorithms.policy_losses import Topr as Topr
    from forge_rl.algorithms.policy_losses import Vespo as Vespo
    from forge_rl.algorithms.preferences import BradleyTerry as BradleyTerry
    from forge_rl.algorithms.preferences import Dpo as Dpo
    from forge_rl.algorithms.preferences import PreferenceLoss as PreferenceLoss
    from forge_rl.algorithms.protocol import Loss as Loss
    from forge_rl.algorithms.protocol import LossInputs as LossInputs
    from forge_rl.algorithms.returns import by_group as by_group
    from forge_rl.algorithms.returns import reinforce_pp_advantages as reinforce_pp_advantages
    from forge_rl.algorithms.returns import token_rewards as token_rewards
    from forge_rl.algorithms.tree import tree_advantages as tree_advantages
    from forge_rl.algorithms.value_loss import ValueLoss as ValueLoss
    from forge_rl.data.adaptive import Adapting as Adapting
    from forge_rl.data.curriculum import Curriculum as Curriculum
    from forge_rl.data.data_config import ONE_DIGIT_ADDITION as ONE_DIGIT_ADDITION
    from forge_rl.data.data_config import DataConfig as DataConfig
    from forge_rl.data.data_config import TaskTexts as TaskTexts
    from forge_rl.data.examples import comparison_episodes as comparison_episodes
    from forge_rl.data.examples import conversation_episodes as conversation_episodes
    from forge_rl.data.examples import preference_episodes as preference_episodes
    from forge_rl.data.mixture import Mixture as Mixture
    from forge_rl.engines.lora_config import LoRAConfig as LoRAConfig
    from forge_rl.engines.optimizer import OptimizerConfig as OptimizerConfig
    from forge_rl.envs.by_source import BySource as BySource
    from forge_rl.envs.calculator import calculator as calculator
    from forge_rl.envs.env_flag import build_environment as build_environment
    from forge_rl.envs.env_flag import sources_of as sources_of
    from forge_rl.envs.game import GuessNumber as GuessNumber
    from forge_rl.envs.protocol import Observation as Observation
    from forge_rl.envs.protocol import Step as Step
    from forge_rl.envs.pure import tool as tool
    from forge_rl.envs.python import PythonEnv as PythonEnv
    from forge_rl.envs.single_turn import SingleTurn as SingleTurn
    from forge_rl.envs.tools import ToolEnv as ToolEnv
    from forge_rl.errors import ForgeError as ForgeError
    from forge_rl.errors import TaskError as TaskError
    from forge_rl.gateway.gateway_config import GatewayConfig as GatewayConfig
    from forge_rl.gateway.sessions import Session as Session
    from forge_rl.packing.rows import pack as pack
    from forge_rl.rewards.reward_flag import RewardTexts as RewardTexts
    from forge_rl.rewards.reward_flag import build_reward as build_reward
    from forge_rl.rewards.verifiers import ReasoningGymReward as ReasoningGymReward
    from forge_rl.rollout.agent_command import AgentCommand as AgentCommand
    from forge_rl.rollout.evaluation import EvalConfig as EvalConfig
    from forge_rl.rollout.examples import ExampleFn as ExampleFn
    from forge_rl.rollout.state import ScheduleConfig as ScheduleConfig
    from forge_rl.run.attach import attach as attach
    from forge_rl.run.example_config import ExampleConfig as ExampleConfig
    from forge_rl.run.launch import launch as launch
    from forge_rl.run.run import Run as Run
    from forge_rl.run.run_config import RunConfig as RunConfig
    from forge_rl.run.start import Starting as Starting
    from forge_rl.run.start import start as start
    from forge_rl.run.task_config import TaskConfig as TaskConfig
    from forge_rl.sandbox.shared import run_code as run_code
    from forge_rl.services.generator_config import GeneratorConfig as GeneratorConfig
    from forge_rl.services.teachers_config import TeachersConfig as TeachersConfig
    from forge_rl.services.trainer_config import CriticConfig as CriticConfig
    from forge_rl.services.trainer_config import TrainerConfig as TrainerConfig
    from forge_rl.types import Batch as Batch
    from forge_rl.types import Episode as Episode
    from forge_rl.types import Group as Group
    from forge_rl.types import Message as Message
    from forge_rl.types import Sampling as Sampling
    from forge_rl.types import Score as Score
    from forge_rl.types import Task as Task
    from forge_rl.types import Turn as Turn

_HOMES = {
    name: module
    for module, names in {
        "algorithms.advantages": (
            "Estimator",
            "batch_advantages",
            "check_group_size",
            "gdpo_advantages",
            "group_advantages",
        ),
        "algorithms.aggregation": ("Aggregation",),
        "algorithms.baselines": (
            "RoleBaselines",
            "remax_advantages",
        ),
        "algorithms.components": (
            "CrossEntropy",
            "Entropy",
            "LossBySource",
            "LossSum",
        ),
        "algorithms.distillation": (
            "Distillation",
            "teacher_advantages",
        ),
        "algorithms.correction": ("Correction",),
        "algorithms.entropy": ("AdaptiveEntropy",),
        "algorithms.gae": (
            "GaeConfig",
            "gae",
        ),
        "algorithms.gates": ("gate_advantages",),
        "algorithms.gigpo": ("gigpo_advantages",),
        "algorithms.tree": ("tree_advantages",),
        "algorithms.hints": ("Hint",),
        "algorithms.loss_flag": (
            "LossTexts",
            "build_loss",
        ),
        "algorithms.losses": (
            "ClippedSurrogate",
            "PolicyLoss",
        ),
        "algorithms.minibatch_losses": (
            "ClipCov",
            "KlCov",
            "M2po",
        ),
        "algorithms.pass_at_k": ("pass_at_k_advantages",),
        "algorithms.policy_losses": (
            "Cispo",
            "Dppo",
            "Gmpo",
            "Gspo",
            "Reinforce",
            "Sapo",
            "Topr",
            "Vespo",
        ),
        "algorithms.preferences": (
            "BradleyTerry",
            "Dpo",
            "PreferenceLoss",
        ),
        "algorithms.protocol": (
            "Loss",
            "LossInputs",
        ),
        "algorithms.returns": (
            "by_group",
            "reinforce_pp_advantages",
            "token_rewards",
        ),
        "algorithms.value_loss": ("ValueLoss",),
        "data.adaptive": ("Adapting",),
        "data.curriculum": ("Curriculum",),
        "data.data_config": (
            "DataConfig",
            "ONE_DIGIT_ADDITION",
            "TaskTexts",
        ),
        "data.examples": (
            "comparison_episodes",
            "conversation_episodes",
            "preference_episodes",
        ),
        "data.mixture": ("Mixture",),
        "engines.lora_config": ("LoRAConfig",),
        "engines.optimizer": ("OptimizerConfig",),
        "envs.by_source": ("BySource",),
        "envs.calculator": ("calculator",),
        "envs.env_flag": (
            "build_environment",
            "sources_of",
        ),
        "envs.game": ("GuessNumber",),
        "envs.protocol": (
            "Observation",
            "Step",
        ),
        "envs.pure": ("tool",),
        "envs.python": ("PythonEnv",),
        "envs.single_turn": ("SingleTurn",),
        "envs.tools": ("ToolEnv",),
        "errors": (
            "ForgeError",
            "TaskError",
        ),
        "gateway.gateway_config": ("GatewayConfig",),
        "gateway.sessions": ("Session",),
        "packing.rows": ("pack",),
        "rewards.reward_flag": (
            "RewardTexts",
            "build_reward",
        ),
        "rewards.verifiers": ("ReasoningGymReward",),
        "rollout.agent_command": ("AgentCommand",),
        "rollout.evaluation": ("EvalConfig",),
        "rollout.state": ("ScheduleConfig",),
        "rollout.examples": ("ExampleFn",),
        "run.attach": ("attach",),
        "run.example_config": ("ExampleConfig",),
        "run.launch": ("launch",),
        "run.run": ("Run",),
        "run.run_config": ("RunConfig",),
        "run.start": (
            "Starting",
            "start",
        ),
        "run.task_config": ("TaskConfig",),
        "sandbox.shared": ("run_code",),
        "services.generator_config": ("GeneratorConfig",),
        "services.teachers_config": ("TeachersConfig",),
        "services.trainer_config": (
            "CriticConfig",
            "TrainerConfig",
        ),
        "types": (
            "Batch",
            "Episode",
            "Group",
            "Message",
            "Sampling",
            "Score",
            "Task",
            "Turn",
        ),
    }.items()
    for name in names
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Import a public name on first use, as torch and Monarch take seconds to import."""
    if name == "__version__":
        from importlib.metadata import version

        return version("forge_rl")
    if name not in _HOMES:
        raise AttributeError(f"module 'forge_rl' has no attribute {name!r}")
    from forge_rl.errors import ForgeError

    is_program = _asked_by_program()
    try:
        if "torch" not in sys.modules and is_program and name not in ("attach", "run_code"):
            from forge_rl.run.first_line import announce

            announce()
        value = getattr(importlib.import_module(f"forge_rl.{_HOMES[name]}"), name)
    except ForgeError as error:
        if is_program:
            sys.exit(f"error: {error}")
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def _asked_by_program() -> bool:
    """Return True if the importer is a running program, such as `python -m recipes.grpo`, not a library or a prompt."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "__main__" and "__file__" in frame.f_globals
