"""Activation checkpointing: which of torchtitan's policies a setting names."""

from __future__ import annotations

from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC

from forge_rl.engines.protocol import TrainSettings


def checkpointing_of(settings: TrainSettings) -> ActivationCheckpointing.Config | None:
    """Return torchtitan's policy; it keeps no state of random numbers, which the models draw none of."""
    policies = {"none": None, "selective": SelectiveAC.Config, "full": FullAC.Config}
    policy = policies[settings.activation_checkpointing]
    return policy and policy(preserve_rng_state=False)
