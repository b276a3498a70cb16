"""Policy on transformers' own modelling code, for models without a native family."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from transformers.modeling_outputs import MoeModelOutputWithPast

from forge_rl.algorithms.logprobs import DEFAULT_SCORING, Scoring, TokenScores
from forge_rl.engines.families.family import Architecture
from forge_rl.engines.families.general import recurrent_mixers
from forge_rl.engines.families.tensor_plan import expert_modules, module_styles
from forge_rl.engines.families.transformers_model import causal_model
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.adapter_switch import AdapterSwitch
from forge_rl.engines.titan.general_attention import IMPLEMENTATION, register
from forge_rl.engines.titan.general_parallel import (
    TensorPeers,
    split_module,
    split_vocabulary,
    spread_experts,
    sum_gradients,
)
from forge_rl.engines.titan.general_routing import general_routers
from forge_rl.engines.titan.general_state import ROW, RowContext, restart_places, restart_states
from forge_rl.engines.titan.head import FloatHead, ValueHead
from forge_rl.engines.titan.host_memory import HostCopies
from forge_rl.engines.titan.lora import add_adapters
from forge_rl.engines.titan.master_weights import MasterWeights
from forge_rl.packing.rows import Row
from forge_rl.weights.names import VALUE_HEAD, SameNames


class GeneralModel(nn.Module):
    """transformers' decoder with the outputs of `PolicyModel`: logits, or scores without holding a row's logits.

        logits = model(token_ids[None], positions[None], row)  # [1, L, V]
        scores = model(token_ids[None], positions[None], row, scored_indices=scored_indices, targets=targets)

    Its weights have the names that transformers gives them; `names` maps these to the folder's files. Anything that the
    model's own code does around its head, such as scaling the hidden states or bounding the logits, is done by running
    that code with stand-ins for decoder and head that return their outputs.

    Args:
        causal: transformers' model, with weights on the meta device and buffers in memory.
        architecture: as read from the same folder.
        values: have one output for each token in place of logits.
        shares_states: see `RowStates.shared`.
    """

    steers = False
    offloads: HostCopies | None = None
    recomputed_tokens: int | None
    adapters: AdapterSwitch | None = None
    """See `PolicyModel`."""
    masters: MasterWeights | None = None
    """See `PolicyModel`."""
    spans_tie = copies_embedding = False

    def __init__(self, causal: Any, architecture: Architecture, *, values: bool, shares_states: bool) -> None:
        super().__init__()
        config = ValueHead.Config if values else FloatHead.Config
        names = architecture.family.names
        assert isinstance(names, SameNames), "read_general gives them"
        self.names = replace(names, head=VALUE_HEAD) if values else names
        self.enable_weight_tying = architecture.tied and not values
        self.model: Any = causal.model
        self._peers: TensorPeers | None = None
        self._shares_states = shares_states
        self.routers = general_routers(causal)
        mixers = recurrent_mixers(causal)
        self.recomputed_tokens = 0 if mixers else None
        # Layers with memory must not carry it from one episode of a row to the next.
        restart_states(mixers, causal.config)
        restart_places(causal)
        with torch.device("meta"):
            self.lm_head: Any = config(
                in_features=architecture.dim, out_features=1 if values else architecture.vocab
            ).build()
        self._tie()
        self._around_head = _AroundHead(causal)
        # Only a model that changes its logits pays for autograd in the head, see `FloatHead.forward`.
        if not values and self._around_head.changes_logits(architecture.vocab):
            self.lm_head.transform = self._around_head.logits
        # `to_empty` will wipe buffers, which no file holds.
        self._buffers_of_config = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.config = causal.config
        if torch.get_default_dtype() == torch.float64:
            for layer in self.layers:
                layer.forward = _in_float64(layer.forward)
        self.eval()  # without dropout, in which the trainer's logprobs would differ from the engine's

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's blocks."""
        return cast(nn.ModuleList, self.model.layers)

    def init_states(self) -> None:
        """Restore what `to_empty` loses: buffers that are computed from the config, and the tie of embedding and
        head."""
        for name, buffer in self._buffers_of_config.items():
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, buffer.clone())
        self._tie()

    def split(self, peers: TensorPeers) -> None:
        """Leave this rank its part of each matrix that tensor-parallel ranks share; call it before `shard`."""
        for name, style in module_styles(self).items():
            split_module(self.model.get_submodule(name), style, peers)
        embedding = self.model.get_input_embeddings()
        if isinstance(self.lm_head, FloatHead):
            split_vocabulary(embedding, self.lm_head, peers, tied=self.enable_weight_tying)
            self._peers = peers

    def _tie(self) -> None:
        if self.enable_weight_tying:
            self.lm_head.weight = self.model.get_input_embeddings().weight

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention_masks: Row,
        *,
        scored_indices: torch.Tensor | slice | None = None,
        targets: torch.Tensor | None = None,
        scoring: Scoring = DEFAULT_SCORING,
    ) -> torch.Tensor | TokenScores:
        """Return what `PolicyModel.forward` returns.

        Args:
            tokens: [1, L] int64.
            positions: [1, L] int64.
            attention_masks: the row, from which each kind of layer derives its mask.
            scored_indices: see `PolicyModel.forward`.
            targets: [N] or [N, K] int64, see `token_scores`.
        """
        context = RowContext(row=attention_masks, shares_states=self._shares_states)
        setattr(self.config, ROW, context)  # also for blocks that are computed again
        # Without a mask, transformers would take jumps in positions for borders between episodes, even within a tree.
        # It reads the mask's values, which the meta device of a plan does not have.
        ones = torch.ones(tokens.shape, dtype=torch.int64, device="cpu" if tokens.is_meta else tokens.device)
        with precision(self.lm_head.weight.dtype):
            hidden = self.model(
                input_ids=tokens, position_ids=positions, attention_mask=ones, use_cache=False
            ).last_hidden_state
            # Counted in training passes only, as the metric is of updates.
            if self.recomputed_tokens is not None and torch.is_grad_enabled():
                self.recomputed_tokens += context.states.recomputed_tokens
            hidden = self._around_head.hidden(hidden)
            if self._peers is not None:
                hidden = sum_gradients(hidden, self._peers)  # each rank has the logits of its part of the vocabulary
            if scored_indices is None:
                outputs = self.lm_head(hidden)
                return cast(torch.Tensor, outputs if outputs.ndim < 3 else self._around_head.logits(outputs))
            return cast(TokenScores, self.lm_head(hidden[0, scored_indices], targets, scoring))

    def spread_experts(self, mesh: DeviceMesh) -> None:
        """Leave this rank its part of each layer's experts; call it before `shard`."""
        for module in expert_modules(self).values():
            spread_experts(module, mesh)

    def shard(
        self,
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        cpu_offload: bool,
        gathers: bool,
        expert_mesh: DeviceMesh | None = None,
    ) -> None:
        """Apply FSDP2 to each block, and to the rest.

        Args:
            dtype: dtype of the passes.
            reduce_dtype: dtype in which gradients are summed.
            gathers: False if a single rank holds all weights, and only casts them.
            expert_mesh: ranks with the same experts, if these are spread.
        """
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": gathers}
        if cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        if expert_mesh is not None:
            for experts in expert_modules(self).values():
                fully_shard(experts, **(options | {"mesh": expert_mesh}))
        for layer in self.layers:
            fully_shard(layer, **options)
        # The root's weights are needed again first in the backward pass.
        fully_shard(self, **(options | {"reshard_after_forward": False}))
        disable_fsdp_gradient_division(self)


def build_general(architecture: Architecture, settings: TrainSettings, *, values: bool = False) -> GeneralModel:
    """Build a model with its weights on the meta device and its buffers in memory, ready to be parallelised.

    Args:
        values: build a value model.
    """
    assert architecture.folder is not None, "read_general gives it"
    register()
    causal = causal_model(architecture.folder, tied=architecture.tied, implementation=IMPLEMENTATION)
    model = GeneralModel(causal, architecture, values=values, shares_states=settings.prefix_states == "shared")
    if settings.lora.rank:
        add_adapters(model, architecture, settings)
    return model


class _StandIn(nn.Module):
    """Takes the place of a module, records its input, and returns an output that was set before."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Any = None
        self.received: torch.Tensor | None = None

    def forward(self, *args: Any, **_: Any) -> Any:
        self.received = args[0] if args else None
        return self.output


class _DecoderOutput(MoeModelOutputWithPast):
    """Output of a decoder with None in place of everything but the hidden states."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _AroundHead:
    """A model's own code between its decoder and its head, and after the head.

    Args:
        causal: transformers' model, which loses its decoder and head.
    """

    def __init__(self, causal: Any) -> None:
        self._causal = causal
        self._decoder, self._head = _StandIn(), _StandIn()
        causal.model, causal.lm_head = self._decoder, self._head

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's input, [1, L, dim], for the decoder's output, [1, L, dim]."""
        # The stand-in for the head records its input; its output only has to have the right shape.
        self._head.output = hidden[..., :1]
        self._run(hidden)
        received, self._head.received = self._head.received, None  # which would keep a row's activations
        return cast(torch.Tensor, received)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, [..., V], for the head's output, [..., V]."""
        self._head.output = outputs if outputs.ndim == 3 else outputs[None]
        logits: torch.Tensor = self._run(self._head.output[..., :1])
        return logits if outputs.ndim == 3 else logits[0]

    def changes_logits(self, vocab: int) -> bool:
        """Return whether logits differ from the head's output."""
        # Any scaling, soft cap or mask of the logits would change some of these values.
        outputs = torch.linspace(-100, 100, vocab)[None, None]
        return not torch.equal(self.logits(outputs), outputs)

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        self._decoder.output = _DecoderOutput(last_hidden_state=hidden)
        # The token ids only give the shape: the decoder is a stand-in.
        tokens = torch.zeros(1, hidden.shape[1], dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self._causal(input_ids=tokens, use_cache=False).logits
        self._decoder.output = self._head.output = None
        return logits


class _InFloat64(TorchFunctionMode):
    """Leaves out the casts of float64 to float32 that transformers' models make in norms, softmax and routers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def precision(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a float64 model computes in float64 throughout, for comparisons free of rounding."""
    return _InFloat64() if dtype == torch.float64 else contextlib.nullcontext()


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a block's forward pass, which activation checkpointing runs once more outside the model's."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _InFloat64():
            return forward(*args, **kwargs)

    return run
