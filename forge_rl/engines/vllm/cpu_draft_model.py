"""Drafts tokens with a smaller, frozen model in vLLM's CPU worker, on vLLM's layers with a KV cache of its own.

vLLM's own draft models need Triton and keep up with all requests, which costs time even while no drafts are wanted.
This one reads a request's tokens when it first drafts for it. Tested with vLLM 0.32.0.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from forge_rl.engines.vllm import cpu, internals
from forge_rl.errors import ModelError

_LEAST = 0.25
"""Minimum probability that the draft model gives a whole draft; a draft ends before the token that would bring it
below."""
_AT_ONCE = 1024
"""Maximum tokens of a request in one forward pass."""


class DraftModel:
    """A model that continues requests with its most likely tokens; its weights never change.

        model = DraftModel(vllm_config, folder, requests=8)
        model.draft(["a"], [np.array([5, 6, 7], np.int32)], [4])  # [[8, 9]]

    Args:
        vllm_config: settings of the engine, whose dtype and block size the model gets.
        folder: Hugging Face folder of the model, whose tokenizer is the policy's.
        requests: maximum number of requests at a time; each has room for the context's keys and values, of which pages
            are allocated when written.

    Raises:
        ModelError: vLLM cannot run the model.
    """

    @torch.inference_mode()
    def __init__(self, vllm_config: Any, folder: Path, *, requests: int) -> None:
        try:
            self._config = internals.config_of_draft_model(vllm_config, str(folder))
            with set_current_vllm_config(self._config):
                self._model: Any = get_model(vllm_config=self._config, prefix="draft_model")
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"vLLM cannot run the draft model {folder}: {error}", hint="choose another one") from error
        cpu.patch(self._model)
        layers: dict[str, Any] = get_layers_from_vllm_config(self._config, AttentionLayerBase)
        # Slots hold keys and values only: states of other layers could not be rewound to an earlier token.
        if not all(type(layer) is Attention and layer.attn_backend is CPUAttentionBackend for layer in layers.values()):
            raise ModelError(
                f"the draft model {folder} has layers with other states than keys and values of whole heads",
                hint="choose one with plain attention, or --generator.speculation suffix",
            )
        self._limit = min(served := vllm_config.model_config.max_model_len, self._config.model_config.max_model_len)
        self._known_ids = self._config.model_config.get_vocab_size()
        self._policy_ids = vllm_config.model_config.get_vocab_size()
        block = vllm_config.cache_config.block_size
        # Each slot owns fixed blocks with room for the longest context, so that no block is allocated or shared later.
        blocks = -(-served // block)
        self._room = blocks * block
        self._blocks = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
        """Blocks of the keys and values of each slot, `[requests, blocks]`."""
        self._keys_and_values: list[torch.Tensor] = []
        alike: dict[object, list[str]] = defaultdict(list)
        for name, layer in layers.items():
            heads, size = layer.num_kv_heads, layer.head_size
            shape = (requests * blocks, heads, block, 2 * size)
            layer.kv_cache = cpu.lazy_zeros(shape, layer.kv_cache_torch_dtype)
            self._keys_and_values.append(layer.kv_cache)
            alike[layer.num_heads, heads, size, layer.sliding_window].append(name)
        build = CPUAttentionBackend.get_builder_cls()
        self._builders: list[Any] = [
            build(layers[names[0]].get_kv_cache_spec(self._config), names, self._config, torch.device("cpu"))
            for names in alike.values()
        ]
        self._slots: OrderedDict[str, int] = OrderedDict((f"free {slot}", slot) for slot in range(requests))
        """Slot of each request, the most recently used last."""
        self._held = np.zeros((requests, served), np.int32)
        """Tokens whose keys and values each slot holds."""
        self._count = [0] * requests
        """Number of those tokens."""

    @torch.inference_mode()
    def draft(
        self, requests: Sequence[str], texts: Sequence[npt.NDArray[np.int32]], max_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Return a draft for each request, perhaps an empty one.

        Args:
            texts: `[T]` of each request, its prompt and answer so far.
            max_tokens: maximum tokens of each draft.
        """
        drafts: list[list[int]] = [[] for _ in requests]
        slots = [self._slot(request) for request in requests]
        active = list[int]()
        for index, text in enumerate(texts):
            if max_tokens[index] > 0 and len(text) + max_tokens[index] <= self._limit and text.max() < self._known_ids:
                self._forget(slots[index], text)
                # A long prompt is read in parts, to bound the activations; the last part is read with the other
                # requests below.
                while len(text) - self._count[slots[index]] > _AT_ONCE:
                    start = self._count[slots[index]]
                    self._read([slots[index]], [text[start : start + _AT_ONCE]])
                active.append(index)
        draft_probs = np.ones(len(requests))
        new_tokens = [texts[index][self._count[slots[index]] :] for index in active]
        while active:
            hidden = self._read([slots[index] for index in active], new_tokens)
            logits = self._model.compute_logits(hidden)[:, : min(self._known_ids, self._policy_ids)]
            probs, tokens = (x.numpy() for x in logits.float().softmax(-1).max(-1))
            draft_probs[active] *= probs
            for index, token in zip(active, tokens.tolist(), strict=True):
                if draft_probs[index] >= _LEAST:
                    drafts[index].append(token)
            active = [
                index for index in active if draft_probs[index] >= _LEAST and len(drafts[index]) < max_tokens[index]
            ]
            new_tokens = [np.array(drafts[index][-1:], np.int32) for index in active]
        return drafts

    def release(self) -> None:
        """Free the pages of all keys and values."""
        self._count = [0] * len(self._count)
        cpu.release(self._keys_and_values)

    def _slot(self, request: str) -> int:
        """Return a request's slot: its own, or the least recently used one."""
        if request not in self._slots:
            # The least recently used request's; if it comes back, its tokens are read again.
            _, slot = self._slots.popitem(last=False)
            self._slots[request], self._count[slot] = slot, 0
        self._slots.move_to_end(request)
        return self._slots[request]

    def _forget(self, slot: int, text: npt.NDArray[np.int32]) -> None:
        """Drop the tokens of a slot that the text does not have, such as rejected drafts. Also drop the text's last
        token, which must be computed again to draft after it."""
        # Keys and values up to the first difference are still right, as each depends on earlier tokens alone.
        count = min(self._count[slot], len(text) - 1)
        differs = np.flatnonzero(self._held[slot, :count] != text[:count])
        self._count[slot] = int(differs[0]) if len(differs) else count

    def _read(self, slots: Sequence[int], new_tokens: Sequence[npt.NDArray[np.int32]]) -> torch.Tensor:
        """Compute keys and values of further tokens of slots; return the last one's hidden states, `[slots, width]`."""
        starts = [self._count[slot] for slot in slots]
        for slot, start, tokens in zip(slots, starts, new_tokens, strict=True):
            self._held[slot, start : start + len(tokens)] = tokens
            self._count[slot] = start + len(tokens)
        places = [torch.arange(start, self._count[slot]) for slot, start in zip(slots, starts, strict=True)]
        ends = torch.tensor([0, *(len(tokens) for tokens in new_tokens)]).cumsum(0).int()
        # A slot's blocks are consecutive, so a token's place in the cache is its position past the slot's first.
        slot_mapping = torch.cat([place + slot * self._room for slot, place in zip(slots, places, strict=True)])
        counts = [self._count[slot] for slot in slots]
        common = CommonAttentionMetadata(
            query_start_loc=ends,
            query_start_loc_cpu=ends,
            seq_lens=torch.tensor(counts, dtype=torch.int32),
            num_reqs=len(slots),
            num_actual_tokens=len(slot_mapping),
            max_query_len=max(map(len, new_tokens)),
            max_seq_len=max(counts),
            block_table_tensor=self._blocks[list(slots)],
            slot_mapping=slot_mapping,
        )
        attn_metadata = {
            name: metadata
            for builder in self._builders
            for metadata in [builder.build(0, common)]
            for name in builder.layer_names
        }
        with set_forward_context(
            attn_metadata,
            self._config,
            num_tokens=len(slot_mapping),
            slot_mapping=dict.fromkeys(attn_metadata, slot_mapping),
        ):
            hidden: torch.Tensor = self._model(
                input_ids=torch.from_numpy(np.concatenate(new_tokens)), positions=torch.cat(places)
            )
        return hidden[ends[1:].long() - 1]
