"""Shared by tests: manifests, small random models and batches for them, ranks. Actors: fake_actors.py."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.protocol import StepRequest, TrainEngine
from forge_rl.metrics import Value, merge_all
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, PackedBatch, Row
from forge_rl.types import Batch, Episode, Group, Score, Task, Turn
from forge_rl.weights.manifest import Bucket, Manifest, TensorEntry

TASK = Task(id="1", source="toy", messages=({"role": "user", "content": "2+2"},))


def manifest_of(version: int, sizes: Mapping[str, int]) -> Manifest:
    """A manifest of one tensor of so many bytes in each of these buckets; their keys may be of older versions."""
    return Manifest(
        version=version,
        tensors=tuple(
            TensorEntry(name=f"w{place}", shape=(size,), dtype="uint8", bucket=key, offset=0)
            for place, (key, size) in enumerate(sizes.items())
        ),
        buckets=tuple(Bucket(key=key, bytes=size) for key, size in sizes.items()),
    )


def manifest_of_bytes(version: int, size: int) -> Manifest:
    """A manifest of one tensor of so many bytes, in a bucket of its own."""
    return manifest_of(version, {f"{version}/0": size})


def batch_of(*groups: Sequence[tuple[float, list[tuple[list[int], list[int]]]]], version: int = 0) -> Batch:
    """Groups of (reward, turns), a turn being (prompt, answer).

    Behaviour logprobs are near a random model's, and spread enough that some ratios are clipped.
    """
    made = []
    for group in groups:
        episodes = []
        for reward, turns in group:
            parts = tuple(
                Turn(
                    prompt_ids=tuple(prompt),
                    token_ids=tuple(answer),
                    logprobs=tuple(-3.5 - (prompt[-1] * 7 + token * 3 + i) % 5 / 4 for i, token in enumerate(answer)),
                    versions=(version,) * len(answer),
                    text="",
                )
                for prompt, answer in turns
            )
            episodes.append(Episode(task=TASK, turns=parts, score=Score(total=reward)))
        made.append(Group(task=TASK, episodes=tuple(episodes)))
    return Batch(groups=tuple(made), version=version)


def random_batch(seed: int, *, vocab: int, groups: int = 2, group_size: int = 3, turns: int = 2) -> Batch:
    """Groups with a shared prompt, of episodes with several turns and rewards that differ."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, vocab, (count,), generator=generator).tolist()

    groups_of_episodes = []
    for _ in range(groups):
        prompt = ids(3, 7)
        episodes = []
        for g in range(group_size):
            history, parts = list(prompt), []
            for _ in range(turns):
                answer = ids(1, 6)
                parts.append((list(history), answer))
                history += [*answer, *ids(1, 4)]
            episodes.append((float(g), parts))
        groups_of_episodes.append(episodes)
    return batch_of(*groups_of_episodes)


def packed(batch: Batch, *, seq_len: int = 64, drop_uniform: bool = True, **layout: Any) -> PackedBatch:
    """Packed with centered rewards as advantages; without groups of equal rewards if drop_uniform."""
    advantages = batch.rewards - batch.rewards.mean(dim=1, keepdim=True)
    return pack(batch, advantages, Layout(seq_len=seq_len, **layout), drop_uniform=drop_uniform).without_uniform


def train_batch(
    engine: TrainEngine,
    laid: PackedBatch,
    loss: Loss | None = None,
    *,
    epochs: int = 1,
    temperature: float = 1.0,
    total_updates: int = 6,
    version: int | None = 0,
) -> dict[str, Value]:
    """Train on this rank's part of a batch, all of whose gradients must be finite; metrics of all updates, merged."""
    ranks = torch.distributed.get_world_size()
    step_metrics = engine.train_batch(
        [replace(minibatch, rows=minibatch.rows[engine.rank :: ranks]) for minibatch in laid.minibatches],
        StepRequest(
            loss=loss or ClippedSurrogate(),
            epochs=epochs,
            temperature=temperature,
            total_updates=total_updates,
            version=version,
        ),
    ).metrics
    assert None not in step_metrics
    return merge_all(metrics for metrics in step_metrics if metrics is not None)


SMALL: dict[str, object] = {
    "vocab_size": 43,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

SMALL_FAMILY: dict[str, dict[str, object]] = {
    "seed_oss": {"pad_token_id": None},  # whose embedding transformers would not train
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "head_dim": 4,  # in transformers that of RoPE
        "v_head_dim": 6,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": 7,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
}
"""What a family needs beside SMALL."""


def make_model(folder: Path, family: str = "llama", **config: object) -> torch.nn.Module:
    """A random Hugging Face model in float32, saved to a folder. Its weights are large enough to make logits differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = {**SMALL, **SMALL_FAMILY.get(family, {}), **config}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **values), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    evaluated: torch.nn.Module = model.eval()
    return evaluated


def add_predicting_layer(folder: Path) -> dict[str, torch.Tensor]:
    """Add a multi-token-prediction layer to a saved DeepSeek-V3, as published ones have it; returns its tensors."""
    path, config = folder / "config.json", json.loads((folder / "config.json").read_text())
    state, layer = load_file(folder / "model.safetensors"), config["num_hidden_layers"]
    prefix, last = f"model.layers.{layer}.", f"model.layers.{layer - 1}."
    added = {prefix + name.removeprefix(last): values for name, values in state.items() if name.startswith(last)}
    added |= {prefix + "embed_tokens.weight": state["model.embed_tokens.weight"]}
    added |= {prefix + "shared_head.head.weight": state["lm_head.weight"]}
    dim = config["hidden_size"]
    added |= {f"{prefix}{name}.weight": torch.ones(dim) for name in ("enorm", "hnorm", "shared_head.norm")}
    added |= {prefix + "eh_proj.weight": torch.full((dim, 2 * dim), 0.1)}
    added = {name: (tensor + 0.01).half() for name, tensor in added.items()}
    save_file(state | added, folder / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return added


def add_head(folder: Path, *, equal: bool) -> None:
    """Add an output projection to the file of a saved tied model: the embedding, or another one."""
    state = load_file(folder / "model.safetensors")
    head = state["model.embed_tokens.weight"].clone()
    if not equal:
        head[-1, -1] += 0.5
    save_file(state | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})


@contextlib.contextmanager
def full_disk(size: int = 0) -> Iterator[None]:
    """Let this process write no file of more than `size` bytes in the body, as on a disk that fills up."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def empty_row() -> Row:
    """Rows of a rank where there are fewer trees than ranks: one token of padding."""
    fields = {"trees": -1, "versions": -1, "episodes": -1, "segments": -1, "turns": -1, "lengths": 1, "until": 1}
    tensors = packed(batch_of([(0.0, [([1], [2])]), (1.0, [([1], [3])])])).rows[0].tensors()
    columns: Any = {name: torch.full((1,), fields.get(name, 0)).to(value.dtype) for name, value in tensors.items()}
    return Row(**columns)


def hf_weights(model: Any) -> dict[str, torch.Tensor]:
    """Whole weights of a titan model by Hugging Face's names."""
    from torch.distributed.tensor import DTensor

    from forge_rl.engines.titan.shards import named_weights, values_of

    return {
        part.name: part.of(values.detach()).clone()
        for name, p in named_weights(model)
        for values in [p.full_tensor() if isinstance(p, DTensor) else values_of(p)]
        for part in model.names.parts(name, values.shape)
    }
