"""The services that a run holds, as one object."""

from __future__ import annotations

from dataclasses import dataclass

from forge_rl.engines.speculation import read_speculation
from forge_rl.errors import ConfigError
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.services.environment import Environment
from forge_rl.services.generator import Generator
from forge_rl.services.reward import RewardService
from forge_rl.services.teachers import Teachers
from forge_rl.services.trainer import Trainer
from forge_rl.services.weight_store import WeightStore


@dataclass(frozen=True, kw_only=True)
class RolloutServices:
    """Handles of the services that generate and score episodes."""

    generator: Generator
    weights: WeightStore
    reward: RewardService
    environment: Environment | None
    """None if an agent plays the episodes."""
    devices: DeviceHandover
    """Hands shared devices back and forth between trainers and generator."""
    teachers: Teachers | None = None

    async def publish(self, trainer: Trainer) -> int:
        """Publish the trainer's weights and load them into the engines; returns their version."""
        version = await trainer.publish(self.weights, dtype=self.generator.dtype)
        await self.generator.load(self.weights, version)
        return version

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call: tokens without a finite logprob, drafted tokens, seconds of each
        transition, use of the KV caches, bytes written to a mirror, sandbox sessions of rewards, and environments whose
        process died."""
        metrics = {"tokens/non_finite": float(self.generator.non_finite.drain())} | self.devices.pop_metrics()
        metrics |= self.generator.pop_metrics() | self.weights.pop_metrics() | self.reward.pop_metrics()
        drafts = self.generator.drain_drafts()
        # Drained in any case; without speculation there is nothing to show.
        if drafts.tokens and read_speculation(self.generator.config.speculation) is not None:
            metrics |= {"rollout/drafted": float(drafts.drafted), "rollout/accepted": float(drafts.accepted)}
            metrics["rollout/drafting"] = drafts.share_of_steps
        return metrics if self.environment is None else metrics | self.environment.pop_metrics()


@dataclass(frozen=True, kw_only=True)
class Services:
    """Handles of all services of a run."""

    trainer: Trainer
    critic: Trainer | None = None
    rollout: RolloutServices | None = None
    """None if the run generates nothing: it trains on given examples, and evaluates by the loss."""

    @property
    def trainers(self) -> tuple[Trainer, ...]:
        """The trainer and, if there is one, the critic: saved together, and rolled back together if one dies."""
        return (self.trainer,) if self.critic is None else (self.trainer, self.critic)


def nothing_generated() -> ConfigError:
    """Return the error for using what a run on given examples does not have."""
    return ConfigError(
        "the run has no engines: it trains on given examples", hint="take batches from run.examples; publish nothing"
    )
