"""Calls verl's own losses and advantages on given batches; runs in verl's environment.

    python -m benchmarks.peers.verl_methods FOLDER

A job's function is one of verl.trainer.ppo.core_algos. Settings of a loss:

    actor, policy_loss  fields of ActorConfig and of its PolicyLossConfig
    shares              ranks and micro-batches, by default [2, 3]; their losses are added up as the trainer does:
                        summed over micro-batches, averaged over ranks
    rollout_is          arguments of compute_rollout_correction_weights, for old_log_prob = the proximal policy's;
                        without it old_log_prob is the engine's
    rollout_rs          arguments of compute_rollout_rejection_mask, of the same policies
    kl_loss             arguments of kl_penalty, with its weight `coef`

Settings of an advantage are its arguments, `config`, the fields of AlgoConfig, and `penalties`, whether the batch's are
subtracted from the rewards of tokens. Tensors are float64; verl itself
computes some in float32. Imports nothing from forge_rl.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig, PolicyLossConfig

from benchmarks.peers.exchange import Arrays, read_batch, read_jobs, write_result, write_versions

Result = dict[str, np.ndarray[Any, Any]]


def loss(function: Callable[..., Any], arrays: Arrays, settings: Mapping[str, Any]) -> Result:
    """Return the loss of a batch and its gradient by the logprobs."""
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    ranks, micro_batches = settings.get("shares", (2, 3))
    logprobs = batch["logprobs"].clone().requires_grad_()
    mask, old = batch["mask"].to(logprobs.dtype), batch["behaviour"]
    weights = None
    if "rollout_is" in settings or "rollout_rs" in settings:
        old = batch["proximal"]
    if given := settings.get("rollout_is"):
        weights, _ = compute_rollout_correction_weights(old - batch["behaviour"], mask, **given)
    if given := settings.get("rollout_rs"):
        mask, _ = compute_rollout_rejection_mask(old - batch["behaviour"], mask, **given)
    actor = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, **settings.get("actor", {})}
    config = ActorConfig(
        **actor,
        policy_loss=PolicyLossConfig(**settings.get("policy_loss", {})),
        global_batch_info={
            "dp_size": ranks,
            "batch_num_tokens": int(batch["mask"].sum()),
            "global_batch_size": len(mask),
            "loss_scale_factor": actor.get("loss_scale_factor"),
        },
    )
    total = logprobs.new_zeros(())
    for rows in torch.arange(len(mask)).tensor_split(ranks * micro_batches):
        part, _ = function(
            old_log_prob=old[rows],
            log_prob=logprobs[rows],
            advantages=batch["advantages"][rows],
            response_mask=mask[rows],
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=None if weights is None else weights[rows],
        )
        if given := settings.get("kl_loss"):
            penalty = core_algos.kl_penalty(logprobs[rows], batch["reference"][rows], given["kl_penalty"])
            part = part + given["coef"] * core_algos.agg_loss(
                loss_mat=penalty,
                loss_mask=mask[rows],
                loss_agg_mode=config.loss_agg_mode,
                **config.global_batch_info,
            )
        total = total + part / ranks
    (gradient,) = torch.autograd.grad(total, logprobs)
    return {"loss": total.detach().numpy(), "gradient": gradient.numpy()}


def advantages(function: Callable[..., Any], arrays: Arrays, settings: Mapping[str, Any]) -> Result:
    """Return the advantages of a batch, [rows, tokens], 0 where masked, and with a critic its returns."""
    mask = torch.from_numpy(arrays["mask"]).double()
    last = arrays["mask"].shape[1] - 1 - arrays["mask"][:, ::-1].argmax(axis=1)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(mask)), torch.from_numpy(last)] = torch.from_numpy(arrays["rewards"])
    if settings.get("penalties"):
        rewards = rewards - torch.from_numpy(arrays["penalties"]) * mask
    given: dict[str, Any] = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": arrays["groups"],
        "values": torch.from_numpy(arrays["values"]),
        "reward_baselines": torch.from_numpy(arrays["greedy"]),
        "config": AlgoConfig(**settings.get("config", {})),
        "non_tensor_batch": {str(part): values for part, values in enumerate(arrays["parts"].T)},
        "batch": {"prompts": mask[:, :1], "attention_mask": torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.long)},
        **{name: value for name, value in settings.items() if name not in ("config", "penalties")},
    }
    wanted = function.__code__.co_varnames[: function.__code__.co_argcount]
    found, returns = function(**{name: value for name, value in given.items() if name in wanted})
    result = {"advantages": (found * mask).numpy()}
    return result | ({"returns": (returns * mask).numpy()} if "values" in wanted else {})


def main() -> None:
    """Run all jobs of a folder."""
    folder = Path(sys.argv[1])
    torch.set_default_dtype(torch.float64)
    write_versions(folder, ("verl", "torch", "transformers"))
    for number, job in enumerate(read_jobs(folder)):
        call = loss if job.function.startswith("compute_policy_loss") else advantages
        result = call(getattr(core_algos, job.function), read_batch(folder, job.batch), job.settings)
        write_result(folder, number, result)


if __name__ == "__main__":
    main()
