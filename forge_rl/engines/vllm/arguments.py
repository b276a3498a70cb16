"""Translates a run's settings into arguments of a vLLM engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import StructuredOutputsConfig, WeightTransferConfig

from forge_rl.engines.devices import device_type
from forge_rl.engines.families.general import has_states
from forge_rl.engines.parts import EnginePart
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.engines.speculation import read_speculation
from forge_rl.engines.vllm import BACKEND
from forge_rl.engines.vllm.adapters import lora_arguments
from forge_rl.engines.vllm.drafting import speculative_config
from forge_rl.engines.vllm.kv_transfer import read_kv_transfer
from forge_rl.engines.vllm.transfer import Owner, WorkerExtension
from forge_rl.models.hf_folder import read_object
from forge_rl.token_arrays import MOST_TOP

_QUANTIZATION = {"none": None, "fp8": "fp8_per_channel", "int8": "int8_per_channel_weight_only"}
"""vLLM's names of the online quantisations, which are applied again whenever weights are loaded."""


def engine_arguments(
    folder: Path, settings: DecodeSettings, seed: int, part: EnginePart | None = None
) -> AsyncEngineArgs:
    """Return vLLM's arguments for an engine of a run, or for one host's part of it."""
    on_cpu = device_type() == "cpu"
    speculation = read_speculation(settings.speculation)
    return AsyncEngineArgs(
        model=str(folder),
        # Whatever the folder holds, read only data: no Python code, no pickled weights.
        trust_remote_code=False,
        load_format="safetensors",
        config_format="hf",
        # The one of tokens/tokenizer.py. In a folder with Mistral's files too, vLLM would take Mistral's tokenizer.
        tokenizer_mode="hf",
        dtype=str(resolve_dtype(settings.dtype)).removeprefix("torch."),
        quantization=_QUANTIZATION[settings.quantization],
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        # A group shares the full blocks of its prompt. vLLM's default of 128 tokens on CPU exceeds short prompts; 32 is
        # the smallest size that its fast kernels support.
        block_size=32 if on_cpu else None,
        kv_cache_memory_bytes=int(settings.kv_cache_gib * (1 << 30) / settings.devices) if on_cpu else None,
        gpu_memory_utilization=settings.gpu_share,
        enforce_eager=settings.enforce_eager or on_cpu,
        # Sleep frees CUDA memory only; on CPU, see `cpu.release_kv_cache`.
        enable_sleep_mode=not on_cpu,
        tensor_parallel_size=settings.tensor_parallel_size,
        data_parallel_size=settings.data_parallel_size,
        enable_expert_parallel=settings.enable_expert_parallel,
        enable_return_routed_experts=settings.routed_experts and not on_cpu,  # on CPU, see cpu_routing.py
        # A single worker runs inside the engine core's process.
        distributed_executor_backend="mp" if settings.tensor_parallel_size > 1 else "uni",
        # Prompt logprobs and the recorder of experts are only tested with prompts that are computed whole on CPU.
        enable_chunked_prefill=not on_cpu,
        # A prompt that is not computed in chunks must fit into one step.
        max_num_batched_tokens=max(settings.max_model_len, 4096),
        # Logprobs after temperature and truncation, as the trainer computes them: with raw ones, the ratio of a first
        # update would not be 1.
        logprobs_mode="processed_logprobs",
        max_logprobs=MOST_TOP,
        # Output projection in float32, as in the trainer: rounding logits to bfloat16 costs 0.03 per logprob.
        hf_overrides={"head_dtype": "float32", **_scaled_queries(folder)},
        override_generation_config=_scaled_attention(folder),
        # vLLM caches the states of such layers only with prompts in chunks.
        enable_prefix_caching=not (on_cpu and has_states(folder)),
        kv_transfer_config=read_kv_transfer(settings.kv_transfer_config),
        speculative_config=speculation and speculative_config(speculation),
        per_request_spec_decode_metrics="summary" if speculation else "none",
        disable_log_stats=True,
        # With "auto", the first constraint would choose the backend for all later ones.
        structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
        seed=seed,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
        additional_config=Owner(os.getpid()),
        **lora_arguments(folder, max_loras=settings.max_loras, max_rank=settings.max_lora_rank),
        **_where(part),
    )


def _scaled_queries(folder: Path) -> dict[str, Any]:
    """Return Ministral 3's scaling of queries by position, under the key where vLLM looks for it.

    vLLM 0.32 reads the scaling only from folders in Mistral's own format. From a folder in Hugging Face's format it
    would serve unscaled queries: beyond `original_max_position_embeddings` tokens, a different model than the one
    trained.
    """
    path = folder / "config.json"
    rope = read_object(path).get("rope_parameters") if path.is_file() else None
    if not isinstance(rope, dict) or "llama_4_scaling_beta" not in rope:
        return {}
    name = "original_max_position_embeddings"
    return {"llama_4_scaling": {"beta": rope["llama_4_scaling_beta"], name: rope[name]}}


def _scaled_attention(folder: Path) -> dict[str, Any]:
    """Return whether Llama 4 scales the queries of layers without RoPE by position, under the key that vLLM reads.

    vLLM looks in generation_config.json, which does not have it, and otherwise scales only if `max_model_len` exceeds
    32768. With a shorter context, tokens past `floor_scale` would come from a different model than the one trained.
    """
    path, name = folder / "config.json", "attn_temperature_tuning"
    config = read_object(path) if path.is_file() else {}
    return {name: bool(config.get(name, True))} if config.get("model_type") == "llama4_text" else {}


def _where(part: EnginePart | None) -> dict[str, Any]:
    if part is None:
        return {}
    nodes = {"nnodes": part.count, "node_rank": part.number}
    return {**nodes, "master_addr": part.address, "master_port": part.port}
