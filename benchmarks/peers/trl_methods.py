"""Calls TRL's own losses and advantages on given batches; runs in TRL's environment.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.peers.trl_methods FOLDER

A job's function is a trainer with one of its methods, such as GRPOTrainer._compute_loss. A real trainer runs it, of
which only forward passes, generation and rewards are replaced by the batch: logprobs, engine logprobs, tokens and their
mask, and parts of rewards. Settings:

    config      fields of the trainer's config
    attributes  attributes of the trainer that are set once it stands, such as use_vllm, which would start vLLM
    old         "behaviour" (default) or "proximal": the logprobs that the trainer has kept from before the update

Trainers of pairs (every second row is the rejected one) and of given answers have a function for a model, which
returns the batch's logprobs, or as scores the means of its values. A function of logits has its own settings:

    generalized_jsd_loss                 beta
    compute_topk_self_distillation_loss  its arguments, and `clip`, of apply_importance_sampling_clipping
    compute_sampled_token_self_distillation_loss  its arguments
    whole       whether each rank has all rows, instead of its share of them

Each rank has config.gradient_accumulation_steps micro-batches; losses and gradients are summed over these and averaged
over ranks, as DDP does.
Tensors are float64. Imports nothing from forge_rl.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.sdpo import loss_utils

from benchmarks.peers.exchange import Arrays, read_batch, read_jobs, write_result, write_versions

CLASSES = {
    "GRPOTrainer": (GRPOTrainer, GRPOConfig),
    "GMPOTrainer": (GMPOTrainer, GMPOConfig),
    "RLOOTrainer": (RLOOTrainer, RLOOConfig),
}
OFFLINE: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "DPOTrainer": (DPOTrainer, DPOConfig, {"prompt": "a", "chosen": "a", "rejected": "a"}),
    "RewardTrainer": (RewardTrainer, RewardConfig, {"prompt": "a", "chosen": "a", "rejected": "a"}),
    "SFTTrainer": (SFTTrainer, SFTConfig, {"prompt": "a", "completion": "a"}),
}
"""Trainers without rollouts, with a row of their data."""
Result = dict[str, np.ndarray[Any, Any]]
Tensors = Mapping[str, torch.Tensor]


class FromBatch:
    """What a trainer gets from the batch instead of a model, an engine and reward functions."""

    batch: dict[str, torch.Tensor]
    """This rank's rows."""
    rewards: torch.Tensor
    """[N, parts], of all ranks."""
    current: tuple[torch.Tensor, torch.Tensor] | None = None
    """Logprobs and entropies of the policy for the rows at hand, with gradient; None before the update."""
    old: str

    def _get_per_token_logps_and_entropies(self, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor, None]:
        return *(self.current or (self.batch[self.old], self.batch["entropy"])), None

    def _calculate_rewards(self, *_: object) -> torch.Tensor:
        return self.rewards

    def _generate(self, prompts: list[str]) -> tuple[object, ...]:
        mask = self.batch["mask"]
        ids, texts = [[1] * mask.shape[1] for _ in mask], ["a"] * len(mask)
        prompt = [[1]] * len(prompts)
        if isinstance(self, RLOOTrainer):
            return prompt, ids, texts
        return prompt, ids, mask.int().tolist(), texts, self.batch["behaviour"].tolist(), {}, None, None


@functools.cache
def model_folder() -> tempfile.TemporaryDirectory[str]:
    """Save a tiny model, from which a trainer with a KL penalty also loads its reference."""
    folder = tempfile.TemporaryDirectory()
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 4)
    counts = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    LlamaForCausalLM(LlamaConfig(**sizes, **counts)).save_pretrained(folder.name)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "a": 1, "<eos>": 2}, unk_token="a")),
        pad_token="<pad>",
        eos_token="<eos>",
    ).save_pretrained(folder.name)
    return folder


@functools.cache
def trainer(name: str, settings: str) -> Any:
    """Make a trainer.

    Args:
        name: name of its class.
        settings: its fields `config` and `attributes`, as JSON.
    """
    base, config_class = CLASSES[name]
    fields = json.loads(settings)
    functions = [part] * len(fields["config"].get("reward_weights", [1.0]))
    with tempfile.TemporaryDirectory() as output:
        # A subclass of the real trainer, in which only FromBatch's methods are replaced.
        peer_trainer = type(name, (FromBatch, base), {})(
            model=model_folder().name,
            reward_funcs=functions,
            args=config_class(
                output_dir=output,
                **{
                    "use_cpu": True,
                    "bf16": False,
                    "report_to": "none",
                    "num_generations": 6,
                    "max_completion_length": 24,
                }
                | fields["config"],
            ),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
        )
    for attribute, value in fields["attributes"].items():
        assert hasattr(peer_trainer, attribute), attribute
        setattr(peer_trainer, attribute, value)
    peer_trainer.model.train()
    peer_trainer.current_gradient_accumulation_steps = peer_trainer.args.gradient_accumulation_steps
    return peer_trainer


@functools.cache
def offline_trainer(name: str, config: str) -> Any:
    """Make a trainer of OFFLINE; `config` has fields of its config, as JSON."""
    base, config_class, row = OFFLINE[name]
    with tempfile.TemporaryDirectory() as output:
        args = {"output_dir": output, "use_cpu": True, "bf16": False, "report_to": "none"} | json.loads(config)
        dataset = Dataset.from_list([row] * 4)
        peer_trainer = base(model=model_folder().name, args=config_class(**args), train_dataset=dataset)
    peer_trainer.model.train()
    return peer_trainer


def part(**_: object) -> list[float]:
    """Stand for a reward function, whose values are the batch's."""
    raise AssertionError("rewards are the batch's")


def call(function: str, arrays: Arrays, settings: Mapping[str, Any]) -> Result:
    """Return what a trainer's method computes for a batch on all ranks."""
    name, method = function.split(".")
    if name in OFFLINE:
        return offline(name, arrays, settings)
    if method in DIVERGENCES:
        return divergence(DIVERGENCES[method], arrays, settings)
    trainer_settings = {field: settings.get(field, {}) for field in ("config", "attributes")}
    peer_trainer = trainer(name, json.dumps(trainer_settings))
    batch = {field: torch.from_numpy(array) for field, array in arrays.items()}
    rows = torch.arange(len(batch["mask"]))
    if not settings.get("whole"):
        rows = rows.tensor_split(peer_trainer.accelerator.num_processes)[peer_trainer.accelerator.process_index]
    peer_trainer.batch = {field: column[rows] for field, column in batch.items()}
    peer_trainer.rewards = batch["parts"] if len(peer_trainer.reward_funcs) > 1 else batch["rewards"][:, None]
    peer_trainer.old, peer_trainer.current = settings.get("old", "behaviour"), None
    inputs = peer_trainer._generate_and_score_completions([{"prompt": "a"}] * len(rows))
    if method == "_generate_and_score_completions":
        local_advantages = inputs["advantages"][:, None] * peer_trainer.batch["mask"]
        return {"advantages": peer_trainer.accelerator.gather(local_advantages).numpy()}
    assert method == "_compute_loss", function
    uniform = bool((batch["advantages"] == batch["advantages"][:, :1]).all())
    inputs["advantages"] = peer_trainer.batch["advantages"][:, 0] if uniform else peer_trainer.batch["advantages"]
    inputs["old_per_token_logps"] = peer_trainer.batch[peer_trainer.old]
    inputs["ref_per_token_logps"] = peer_trainer.batch["reference"]
    return _loss(peer_trainer, inputs, batch, rows)


def _loss(
    peer_trainer: Any, inputs: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor], rows: torch.Tensor
) -> Result:
    leaves = [batch[name].clone().requires_grad_() for name in ("logprobs", "entropy")]
    total = leaves[0].new_zeros(())
    for micro_batch in torch.arange(len(rows)).tensor_split(peer_trainer.args.gradient_accumulation_steps):
        peer_trainer.current = tuple(leaf[rows[micro_batch]] for leaf in leaves)
        part = {name: value[micro_batch] if value.ndim else value for name, value in inputs.items()}
        total = total + peer_trainer._compute_loss(peer_trainer.model, part)
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    arrays = [peer_trainer.accelerator.reduce(value, "mean").numpy() for value in (total.detach(), *gradients)]
    result = dict(zip(("loss", "gradient", "entropy_gradient"), arrays, strict=True))
    return (
        result if getattr(peer_trainer, "entropy_coef", 0.0) else {name: result[name] for name in ("loss", "gradient")}
    )


def offline(name: str, arrays: Arrays, settings: Mapping[str, Any]) -> Result:
    """Return the loss of a trainer without rollouts, and its gradient by the logprobs, or by the values of scores."""
    peer_trainer = offline_trainer(name, json.dumps(settings["config"]))
    batch = {field: torch.from_numpy(array) for field, array in arrays.items()}
    mask, is_reward = batch["mask"], name == "RewardTrainer"
    leaf = batch["values" if is_reward else "logprobs"].clone().requires_grad_()
    total, accumulated = leaf.new_zeros(()), peer_trainer.args.gradient_accumulation_steps
    accelerator = peer_trainer.accelerator
    local_rows = torch.arange(len(mask)).tensor_split(accelerator.num_processes)[accelerator.process_index]
    for rows in local_rows.tensor_split(accumulated):
        if name == "SFTTrainer":
            model = model_of(leaf, mask, rows)
            loss = peer_trainer.compute_loss(model, tokens_of(mask[rows]), num_items_in_batch=mask.sum())
        else:
            rows = torch.cat([rows[::2], rows[1::2]])  # the chosen ones first
            peer_trainer.ref_model = model_of(batch["reference"], mask, rows)
            method = peer_trainer.compute_loss if is_reward else peer_trainer._compute_loss
            loss = method(model_of(leaf, mask, rows), tokens_of(mask[rows]), False) / accumulated
        total = total + loss
    (gradient,) = torch.autograd.grad(total, leaf)
    results = [accelerator.reduce(value, "mean").numpy() for value in (total.detach(), gradient)]
    return dict(zip(("loss", "gradient"), results, strict=True))


def tokens_of(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a trainer's inputs for answers after a prompt of one token."""
    completion = torch.nn.functional.pad(mask, (1, 0)).long()
    ids = torch.ones_like(completion)
    return {"input_ids": ids, "attention_mask": ids, "completion_mask": completion}


def model_of(values: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> Callable[..., SimpleNamespace]:
    """Return a model that answers with the logprobs of rows, and with their means as scores."""
    row_values = values[rows].where(mask[rows], 0.0)
    nothing = torch.zeros_like(row_values)
    scores = row_values.sum(dim=1, keepdim=True) / mask[rows].sum(dim=1, keepdim=True).clamp(min=1)
    outputs = SimpleNamespace(
        log_probs=row_values, logits=scores, label_mask=mask[rows], entropy=nothing, mean_logits=nothing
    )
    outputs.is_top1 = nothing.bool()
    return lambda **_: outputs


def jsd(student: torch.Tensor, batch: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Return GKD's divergence of tokens, summed."""
    labels = torch.zeros_like(batch["tokens"]).masked_fill(~batch["mask"], -100)
    divergence_sum: torch.Tensor = GKDTrainer.generalized_jsd_loss(
        student, batch["teacher"], labels, num_items_in_batch=1, **settings
    )
    return divergence_sum


def top_k(student: torch.Tensor, batch: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Return SDPO's divergence over the student's most likely tokens, summed."""
    options = {name: value for name, value in settings.items() if name != "clip"}
    losses = loss_utils.compute_topk_self_distillation_loss(student, batch["teacher"], **options)
    if "clip" in settings:
        policies = batch["logprobs"], batch["behaviour"]
        losses = loss_utils.apply_importance_sampling_clipping(losses, *policies, settings["clip"])
    divergence_sum: torch.Tensor = losses.where(batch["mask"], 0.0).sum()
    return divergence_sum


def sampled(student: torch.Tensor, batch: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Return the reverse KL of sampled tokens, summed."""
    policies = student, batch["teacher"]
    losses = loss_utils.compute_sampled_token_self_distillation_loss(*policies, batch["tokens"], **settings)
    divergence_sum: torch.Tensor = losses.where(batch["mask"], 0.0).sum()
    return divergence_sum


DIVERGENCES: dict[str, Any] = {
    "generalized_jsd_loss": jsd,
    "compute_topk_self_distillation_loss": top_k,
    "compute_sampled_token_self_distillation_loss": sampled,
}


def divergence(function: Any, arrays: Arrays, settings: Mapping[str, Any]) -> Result:
    """Return the mean of a divergence over tokens, summed up from micro-batches and ranks, and its gradient by the
    student's logits."""
    batch = {field: torch.from_numpy(array) for field, array in arrays.items()}
    leaf, accelerator = batch["student"].clone().requires_grad_(), Accelerator(cpu=True)
    local_rows = torch.arange(len(leaf)).tensor_split(accelerator.num_processes)[accelerator.process_index]
    total = leaf.new_zeros(())
    for rows in local_rows.tensor_split(3):
        part = {field: column[rows] for field, column in batch.items()}
        total = total + function(leaf[rows], part, settings) / batch["mask"].sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    results = [accelerator.reduce(value, "sum").numpy() for value in (total.detach(), gradient)]
    return dict(zip(("loss", "gradient"), results, strict=True))


def main() -> None:
    """Run all jobs of a folder."""
    folder = Path(sys.argv[1])
    torch.set_default_dtype(torch.float64)
    for number, job in enumerate(read_jobs(folder)):
        result = call(job.function, read_batch(folder, job.batch), job.settings)
        if PartialState().is_main_process:
            write_result(folder, number, result)
    if PartialState().is_main_process:
        write_versions(folder, ("trl", "torch", "transformers", "accelerate"))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
