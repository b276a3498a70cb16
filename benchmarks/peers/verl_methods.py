"""Calls verl's own losses and advantages on given batches; runs in verl's environment.

    python -m benchmarks.peers.verl_methods FOLDER

A job's function is a loss of verl.workers.utils.losses, which combines the terms of core_algos, or an advantage of
core_algos. Settings of a loss:

    actor, policy_loss  fields of ActorConfig and of its PolicyLossConfig
    critic              fields of CriticConfig, for value_loss, whose gradient is by the values
    shares              ranks and micro-batches, by default [2, 3]; their losses are added up as the trainer does:
                        summed over micro-batches, averaged over ranks
    rollout_is          arguments of compute_rollout_correction_weights, for old_log_prob = the proximal policy's;
                        without it old_log_prob is the engine's
    rollout_rs          arguments of compute_rollout_rejection_mask, of the same policies
    kept                whether the loss is divided by the tokens that are not rejected, as verl's workers do

Settings of an advantage are its arguments, `config`, the fields of AlgoConfig, and `penalties`, whether the batch's are
subtracted from the rewards of tokens. Tensors are float64; verl itself computes some in float32. Imports nothing from
forge_rl.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.config import ActorConfig, CriticConfig, PolicyLossConfig
from verl.workers.utils import losses

from benchmarks.peers.exchange import Arrays, read_batch, read_jobs, write_result, write_versions

Result = dict[str, np.ndarray[Any, Any]]


def loss(function: Callable[..., Any], arrays: Arrays, settings: Mapping[str, Any]) -> Result:
    """Return the loss of a batch and its gradients by logprobs or values and, if they have any, entropies."""
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    ranks, micro_batches = settings.get("shares", (2, 3))
    output = "values" if function is losses.value_loss else "log_probs"
    leaves = [batch[name].clone().requires_grad_() for name in (output.replace("log_probs", "logprobs"), "entropy")]
    mask, old = batch["mask"].to(torch.float64), batch["behaviour"]
    global_sizes = {"dp_size": ranks, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    columns = {"advantages": batch["advantages"], "ref_log_prob": batch["reference"], "returns": batch["returns"]}
    columns["values"] = batch["old_values"]
    if "rollout_is" in settings or "rollout_rs" in settings:
        old = batch["proximal"]
    if options := settings.get("rollout_is"):
        columns["rollout_is_weights"], _ = compute_rollout_correction_weights(old - batch["behaviour"], mask, **options)
    if options := settings.get("rollout_rs"):
        mask, _ = compute_rollout_rejection_mask(old - batch["behaviour"], mask, **options)
    if settings.get("kept"):
        global_sizes["batch_num_tokens"] = int(mask.sum())
    config: Any = ActorConfig(
        **{"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1} | settings.get("actor", {}),
        policy_loss=PolicyLossConfig(**settings.get("policy_loss", {})),
    )
    if output == "values":
        config = CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, **settings.get("critic", {}))
    total = leaves[0].new_zeros(())
    for rows in torch.arange(len(mask)).tensor_split(ranks * micro_batches):
        prompts, responses = torch.ones(len(rows), 1), torch.ones_like(mask[rows])
        data = TensorDict(
            {name: column[rows] for name, column in columns.items()}
            | {"old_log_probs": old[rows], "response_mask": mask[rows], "prompts": prompts, "responses": responses}
            | {"attention_mask": torch.cat([prompts, responses], dim=1).long()},
            batch_size=len(rows),
        )
        assign_non_tensor(data, pad_mode=DatasetPadMode.RIGHT, **global_sizes)
        outputs, entropy = (leaf[rows] for leaf in leaves)
        if function is not losses.sft_loss:  # they shift the outputs, of all tokens, by one
            outputs, entropy = (torch.nn.functional.pad(values, (0, 1)).flatten() for values in (outputs, entropy))
        part, _ = function(config, {output: outputs, "entropy": entropy}, data)
        total = total + part / ranks
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    result = {"loss": total.detach().numpy(), "gradient": gradients[0].numpy()}
    return result | (
        {"entropy_gradient": gradients[1].numpy()} if settings.get("actor", {}).get("entropy_coeff") else {}
    )


def advantages(function: Callable[..., Any], arrays: Arrays, settings: Mapping[str, Any]) -> Result:
    """Return the advantages of a batch, [rows, tokens], 0 where masked, and with a critic its returns."""
    mask = torch.from_numpy(arrays["mask"]).double()
    # Index of each row's last trained token, on which the reward is placed.
    last = arrays["mask"].shape[1] - 1 - arrays["mask"][:, ::-1].argmax(axis=1)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(mask)), torch.from_numpy(last)] = torch.from_numpy(arrays["rewards"])
    if settings.get("penalties"):
        rewards = rewards - torch.from_numpy(arrays["penalties"]) * mask
    available: dict[str, Any] = {
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
    # Each estimator gets only the arguments that it takes.
    parameter_names = function.__code__.co_varnames[: function.__code__.co_argcount]
    token_advantages, returns = function(
        **{name: value for name, value in available.items() if name in parameter_names}
    )
    result = {"advantages": (token_advantages * mask).numpy()}
    return result | ({"returns": (returns * mask).numpy()} if "values" in parameter_names else {})


def main() -> None:
    """Run all jobs of a folder."""
    folder = Path(sys.argv[1])
    torch.set_default_dtype(torch.float64)
    write_versions(folder, ("verl", "torch", "transformers"))
    for number, job in enumerate(read_jobs(folder)):
        batch = read_batch(folder, job.batch)
        if job.function.endswith("_loss"):
            result = loss(getattr(losses, job.function), batch, job.settings)
        else:
            result = advantages(getattr(core_algos, job.function), batch, job.settings)
        write_result(folder, number, result)


if __name__ == "__main__":
    main()
