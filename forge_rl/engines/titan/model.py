"""Builds the policy on torchtitan from an architecture; each family adds its kind of layer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import spmd_types as spmd  # type: ignore[import-untyped]
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import Embedding
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.sharding import ShardingConfig

from forge_rl.algorithms.logprobs import DEFAULT_SCORING, Scoring, TokenScores
from forge_rl.engines.devices import device_type
from forge_rl.engines.families.family import Architecture
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.adapter_switch import AdapterSwitch
from forge_rl.engines.titan.block_kernels import add_norm, has_kernels
from forge_rl.engines.titan.cpu_attention import TreeAttention
from forge_rl.engines.titan.cpu_feed_forward import LeanFeedForward
from forge_rl.engines.titan.cpu_norm import LeanRMSNorm
from forge_rl.engines.titan.fused_block import FusedAttention, FusedBlock, is_plain
from forge_rl.engines.titan.head import FloatHead, ValueHead
from forge_rl.engines.titan.host_memory import HostCopies, offload_inputs
from forge_rl.engines.titan.lora import add_adapters
from forge_rl.engines.titan.master_weights import MasterWeights
from forge_rl.engines.titan.moe import moe_config
from forge_rl.engines.titan.products import embed
from forge_rl.engines.titan.rope import half_rope
from forge_rl.engines.titan.routing import routers
from forge_rl.engines.titan.row_attention import RowAttention
from forge_rl.weights.names import VALUE_HEAD, Names, SameNames

if TYPE_CHECKING:
    from forge_rl.engines.titan.general_model import GeneralModel

LOADED = dict.fromkeys(("weight", "bias"), skip_param_init)
"""No initialisation: every weight is read from the folder."""


class PolicyModel(Decoder):
    """torchtitan's decoder, which also scores targets without holding a row's logits.

    logits = model(token_ids[None], positions[None], masks)  # [1, L, V]
    scores = model(token_ids[None], positions[None], masks, scored_indices=scored_indices, targets=targets)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        mtp_layers: tuple[()] = ()
        """Always empty; torchtitan's sharding of DeepSeek-V3 reads it."""

    names: Names | SameNames
    """Hugging Face's names of its weights."""
    steers = False
    """Whether training moves the biases that choose experts; these are buffers."""
    offloads: HostCopies | None = None
    """Copies of layers' inputs in host memory, if they are kept there."""
    recomputed_tokens: int | None = None
    """Prefix tokens computed again for branches, in the passes of an update; None without layers with a state."""
    adapters: AdapterSwitch | None = None
    """Shared state of its adapters; None if all weights are trained."""
    masters: MasterWeights | None = None
    """Its weights in float32, if passes run on copies of them."""
    spans_tie = False
    """Whether the first and the last pipeline stage each hold the weight that embedding and head share."""

    @property
    def copies_embedding(self) -> bool:
        """True if its head holds a copy of the first stage's embedding."""
        return self.spans_tie and self.lm_head is not None

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention_masks: Any,
        *,
        scored_indices: torch.Tensor | slice | None = None,
        targets: torch.Tensor | None = None,
        scoring: Scoring = DEFAULT_SCORING,
    ) -> torch.Tensor | TokenScores:
        """Return logits `[1, L, V]`, or values `[1, L]` of a value model, or scores of N targets; a pipeline stage
        without the head returns hidden states `[1, L, dim]`.

        Args:
            tokens: [1, L] int64; on a stage without the embedding, hidden states `[1, L, dim]`.
            positions: [1, L] int64.
            attention_masks: see `masks.attention_mask`.
            scored_indices: the N positions to score; the output projection, a fifth of a small model's compute, runs on
                these only. None for logits or values.
            targets: [N] or [N, K] int64, see `token_scores`.
        """
        hidden = tokens if self.tok_embeddings is None else embed(self.tok_embeddings, tokens)
        delta: torch.Tensor | None = None  # what the last layer has left to add
        for layer in self.layers.values():
            # `deferred` bypasses the layer's `__call__`, and with it FSDP's hooks. With masters there is no FSDP.
            if self.masters is not None and isinstance(layer, FusedBlock) and layer.defers(hidden):
                hidden, delta = layer.deferred(hidden, delta, attention_masks, positions)
            else:
                hidden, delta = layer(_sum(hidden, delta), attention_masks, positions), None
        if self.norm is None:
            return _sum(hidden, delta)
        # The final norm takes the last residual along, as each layer's first norm does.
        if delta is not None and has_kernels(hidden, "norms") and is_plain(self.norm):
            hidden = add_norm(hidden, delta, self.norm.weight, self.norm.eps)[1]
        else:
            hidden = self.norm(_sum(hidden, delta))
        if isinstance(hidden, DTensor):
            # Each rank's gradient covers only its part of the output projection; the backward pass sums them. A
            # value head is whole on each rank.
            is_value_head = isinstance(self.lm_head, ValueHead)
            hidden = hidden.to_local(grad_placements=[Replicate() if is_value_head else Partial()])
        if scored_indices is None:
            return cast(torch.Tensor, self.lm_head(hidden))
        return cast(TokenScores, self.lm_head(hidden.squeeze(0)[scored_indices], targets, scoring))


def _sum(hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    return hidden if delta is None else hidden + delta


def build_model(architecture: Architecture, settings: TrainSettings, *, values: bool = False) -> PolicyModel:
    """Build the model on the current default device, without weights, ready to be parallelised.

    Tensor-parallel ranks also split activations between the layers' matrices.

    Args:
        values: build a value model, with one output for each token in place of logits.
    """
    a = architecture
    # RoPE's cache need only cover the longest row, however many positions the model supports.
    positions = min(a.max_positions, settings.longest_row)
    config = PolicyModel.Config(
        dim=a.dim,
        vocab_size=a.vocab,
        enable_weight_tying=a.tied and not values,
        tok_embeddings=Embedding.Config(num_embeddings=a.vocab, embedding_dim=a.dim, param_init=LOADED),
        norm=norm(a, a.dim),
        lm_head=ValueHead.Config(in_features=a.dim, out_features=1, param_init=LOADED)
        if values
        else FloatHead.Config(in_features=a.dim, out_features=a.vocab, param_init=LOADED),
        layers=[a.family.layer(a, index, positions) for index in range(a.layers)],
    )
    a.family.set_sharding(
        config, enable_sp=settings.tensor_parallel_degree > 1, enable_ep=settings.expert_parallel_degree > 1
    )
    # A value head has a single row, which tensor-parallel ranks cannot split.
    if values:
        config.lm_head.sharding_config = ShardingConfig(
            state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        )
    model = cast(PolicyModel, config.build())
    model.names = replace(a.family.names, head=VALUE_HEAD) if values else a.family.names
    # Replayed experts are looked up by the layer's number in the whole model, on whatever stage it is.
    for number, layer in model.layers.items():
        for router in routers(layer):
            router.layer = int(number)
    if settings.lora.rank:
        add_adapters(model, architecture, settings)
    return model


def recompute_activations(
    model: PolicyModel | GeneralModel, mode: Literal["none", "selective", "full"], *, offload: bool = False
) -> None:
    """Apply torchtitan's activation checkpointing; it saves no RNG state, as the models draw no random numbers.

    Args:
        offload: keep the layers' inputs in host memory; requires full checkpointing.
    """
    if mode != "none":
        policy = FullAC if mode == "full" else SelectiveAC
        policy.Config(preserve_rng_state=False).build(dump_folder="").apply(model)
    if offload:
        assert mode == "full", f"{mode} checkpointing keeps more than inputs, outside of what is offloaded"
        cast(Any, model).offloads = offload_inputs(model.get_submodule("layers").children())


def gqa_layer(
    architecture: Architecture, index: int, max_positions: int, *, qk_norm: bool = False, qkv_bias: bool = False
) -> Any:
    """Make the `Config` of a layer with grouped-query attention, with experts if the architecture has them.

    q and k use Hugging Face's rotate-half order in every family (torchtitan's own Llama uses adjacent pairs), so that
    weights/names.py only renames. Without norms and biases, torchtitan's Qwen3 layer is Llama's.

    Args:
        max_positions: length of the RoPE cache, in tokens.
        qk_norm: normalise q and k of each head.
        qkv_bias: add a bias to q, k and v.
    """
    a = architecture
    attention = make_gqa_config(
        dim=a.dim,
        n_heads=a.heads,
        n_kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        wqkv_param_init=LOADED,
        wo_param_init=LOADED,
        inner_attention=inner_attention(),
        rope=half_rope(a, max_positions, scales_scores=True),
        qk_norm=norm(a, a.head_dim) if qk_norm else None,
    )
    attention.qkv_linear.wq.bias = attention.qkv_linear.wkv.bias = qkv_bias
    # torchtitan builds the config; only its class changes, to the one that uses the kernels.
    fused = FusedAttention.Config(**{field.name: getattr(attention, field.name) for field in fields(attention)})
    return FusedBlock.Config(
        attention=fused, attention_norm=norm(a, a.dim), ffn_norm=norm(a, a.dim), **network(a, index)
    )


def network(architecture: Architecture, layer: int) -> dict[str, Any]:
    """Make the `Config` of a layer's feed-forward network or experts, keyed by field name."""
    a = architecture
    if a.experts is not None and layer in a.experts.layers:
        return {"moe": moe_config(a.experts, a.dim)}
    dense = make_ffn_config(dim=a.dim, hidden_dim=a.hidden_dim, w1_param_init=LOADED, w2w3_param_init=LOADED)
    return {"feed_forward": LeanFeedForward.Config(w1=dense.w1, w2=dense.w2, w3=dense.w3)}


def inner_attention() -> Any:
    """Make the `Config` of this device's attention kernel."""
    return RowAttention.Config() if device_type() == "cuda" else TreeAttention.Config()


def norm(architecture: Architecture, dim: int) -> Any:
    """Make the `Config` of an RMSNorm over `dim` elements."""
    return LeanRMSNorm.Config(normalized_shape=dim, eps=architecture.norm_eps, param_init=LOADED)
