"""Maps the activation checkpointing setting to torchtitan's policies."""

from __future__ import annotations

from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC

from forge_rl.engines.protocol import TrainSettings


def checkpointing_of(settings: TrainSettings) -> ActivationCheckpointing.Config | None:
    """Return torchtitan's policy; it does not save RNG state, as the models draw no random numbers."""
    policies = {"none": None, "selective": SelectiveAC.Config, "full": FullAC.Config}
    policy = policies[settings.activation_checkpointing]
    return policy and policy(preserve_rng_state=False)
