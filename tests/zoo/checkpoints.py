"""Published checkpoints by name: what their folders have that others lack, as their config.json, index and
tokenizer_config.json say. Only sizes are small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

QWEN_STOPS, LLAMA_STOPS = ("<|im_end|>", "<|endoftext|>"), ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
DEEPSEEK_STOPS = ("<\uff5cend\u2581of\u2581sentence\uff5c>",)
HARMONY_STOPS = ("<|call|>", "<|endoftext|>", "<|return|>")
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}
LLAMA3_ROPE = {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "max_window_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 8,
        "use_mrope": False,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 64,
        "max_window_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 64,
        "max_window_layers": 2,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 2,
        "head_dim": 64,
        "initial_context_length": 64,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            **YARN,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 32,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },
    "seed_oss": {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 32,
        "pad_token_id": 255,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "n_group": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    },
}
"""Keys that the files of a family have in common, of which many have no effect."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The quirks of a published folder."""

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys beside those of the family."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the files."""
    head: Literal["as configured", "copy", "own"] = "as configured"
    """What a tied model's files hold as lm_head.weight; as configured, they hold none."""
    shards: int = 1
    """Number of files; with an index if more than one."""
    buffers: bool = False
    """Whether the files hold the frequencies of RoPE."""
    predicting: bool = False
    """Whether the files hold a multi-token-prediction layer, which config.json lists."""
    quantized: Literal["", "fp8", "mxfp4"] = ""
    stops: tuple[str, ...] = ("</s>",)
    """Tokens that generation_config.json lists as eos; config.json has the last of them."""
    padding: int = 0
    """Rows of the embedding that the tokenizer has no token for."""
    template: Literal["file", "inline", "list", "folder", "none"] = "inline"
    """Where the chat template is: chat_template.jinja, tokenizer_config.json as text or as a list of named ones, or
    chat_template.jinja with others in additional_chat_templates; base models have none."""
    tokenizer: Literal["tokenizer.json", "vocab.json", "tokenizer.model"] = "tokenizer.json"
    """File of the vocabulary: vocab.json has merges.txt with it, tokenizer.model is SentencePiece's."""


CHECKPOINTS: dict[str, Checkpoint] = {
    "ByteDance-Seed/Seed-OSS-36B-Base": Checkpoint(family="seed_oss", shards=2, template="file"),
    "Qwen/Qwen3-0.6B": Checkpoint(family="qwen3", head="copy", stops=QWEN_STOPS, padding=57),
    "Qwen/Qwen3-4B": Checkpoint(family="qwen3", head="copy", shards=3, stops=QWEN_STOPS, padding=57),
    "Qwen/Qwen3-4B-Instruct-2507": Checkpoint(
        family="qwen3", config={"rope_theta": 5000000}, shards=3, stops=QWEN_STOPS, padding=57, template="file"
    ),
    "Qwen/Qwen3-8B": Checkpoint(
        family="qwen3", config={"tie_word_embeddings": False}, shards=5, stops=QWEN_STOPS, padding=57
    ),
    "Qwen/Qwen3-8B with YaRN, as its card says": Checkpoint(
        family="qwen3", config={"tie_word_embeddings": False, "rope_scaling": YARN}, stops=QWEN_STOPS, padding=57
    ),
    "Qwen/Qwen3-0.6B-FP8": Checkpoint(family="qwen3", head="copy", quantized="fp8", stops=QWEN_STOPS, padding=57),
    "Qwen/Qwen3-30B-A3B": Checkpoint(family="qwen3_moe", shards=16, stops=QWEN_STOPS, padding=57),
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": Checkpoint(
        family="qwen3_moe", quantized="fp8", shards=4, stops=QWEN_STOPS, padding=57, template="file"
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": Checkpoint(
        family="qwen2", config={"tie_word_embeddings": True}, stops=QWEN_STOPS, padding=57
    ),
    "Qwen/Qwen2.5-7B": Checkpoint(family="qwen2", shards=4, stops=QWEN_STOPS[1:], padding=57),
    "Qwen/Qwen2.5-Math-1.5B": Checkpoint(
        family="qwen2", config={"tie_word_embeddings": True, "rope_theta": 10000}, stops=QWEN_STOPS[1:], padding=57
    ),
    "Qwen/Qwen2-0.5B": Checkpoint(
        family="qwen2", config={"tie_word_embeddings": True}, tokenizer="vocab.json", stops=QWEN_STOPS[1:], padding=57
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Checkpoint(
        family="qwen2", config={"rope_theta": 10000}, stops=DEEPSEEK_STOPS, padding=41
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": Checkpoint(
        family="llama", config=LLAMA3_ROPE, shards=2, stops=DEEPSEEK_STOPS
    ),
    "meta-llama/Llama-3.2-1B-Instruct": Checkpoint(
        family="llama",
        config={**LLAMA3_ROPE, "head_dim": 32, "tie_word_embeddings": True},
        stops=LLAMA_STOPS,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": Checkpoint(family="llama", config=LLAMA3_ROPE, shards=4, stops=LLAMA_STOPS),
    "meta-llama/Llama-3.3-70B-Instruct": Checkpoint(
        family="llama",
        config={**LLAMA3_ROPE, "hidden_size": 128, "num_attention_heads": 4},
        shards=30,
        stops=LLAMA_STOPS,
    ),
    "meta-llama/Llama-2-7b-hf": Checkpoint(
        family="llama",
        config={"num_key_value_heads": 2},
        dtype="float16",
        shards=2,
        buffers=True,
        template="none",
    ),
    "lmsys/vicuna-7b-v1.5, with a template": Checkpoint(
        family="llama", config={"num_key_value_heads": 2}, dtype="float16", tokenizer="tokenizer.model"
    ),
    "lmsys/longchat-7b-v1.5-32k": Checkpoint(
        family="llama", config={"rope_scaling": {"type": "linear", "factor": 8.0}}, dtype="float16", template="none"
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Checkpoint(
        family="llama",
        config={
            "num_attention_heads": 3,
            "hidden_size": 96,
            "is_llama_config": True,
            "rope_interleaved": False,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
        stops=QWEN_STOPS[:1],
    ),
    "HuggingFaceTB/SmolLM2-1.7B": Checkpoint(
        family="llama",
        config={"num_key_value_heads": 2, "rope_theta": 130000, "tie_word_embeddings": True},
        stops=QWEN_STOPS[1:],
        template="none",
    ),
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": Checkpoint(family="llama", dtype="float32", template="none"),
    "NousResearch/Hermes-3-Llama-3.1-8B": Checkpoint(
        family="llama", config=LLAMA3_ROPE, shards=4, stops=QWEN_STOPS[:1], template="list"
    ),
    "CohereLabs' way with templates, by transformers 5": Checkpoint(family="llama", template="folder"),
    "a fine-tuned Llama-3.2-1B whose head was changed": Checkpoint(
        family="llama", config={**LLAMA3_ROPE, "tie_word_embeddings": True}, head="own", stops=LLAMA_STOPS
    ),
    "openai/gpt-oss-20b": Checkpoint(
        family="gpt_oss",
        quantized="mxfp4",
        shards=3,
        stops=HARMONY_STOPS,
        template="file",
    ),
    "unsloth/gpt-oss-20b-BF16": Checkpoint(family="gpt_oss", shards=4, stops=HARMONY_STOPS, template="file"),
    "deepseek-ai/DeepSeek-V3": Checkpoint(
        family="deepseek_v3",
        config={
            "aux_loss_alpha": 0.001,
            "ep_size": 1,
            "num_nextn_predict_layers": 1,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
                "type": "yarn",
            },
            "seq_aux": True,
        },
        shards=6,
        predicting=True,
        quantized="fp8",
        stops=DEEPSEEK_STOPS,
    ),
    "moonshotai/Kimi-K2-Instruct, with a tokenizer.json": Checkpoint(
        family="deepseek_v3",
        config={
            "model_type": "kimi_k2",
            "n_group": 1,
            "rope_scaling": {
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
                "type": "yarn",
            },
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827,
            "topk_group": 1,
        },
        shards=4,
        quantized="fp8",
        stops=("<|im_end|>", "[EOS]"),
        template="file",
    ),
    "moonshotai/Moonlight-16B-A3B-Instruct": Checkpoint(
        family="deepseek_v3",
        config={
            "n_group": 1,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.446,
        },
        shards=3,
        stops=QWEN_STOPS[:1],
    ),
}
"""Supported ones."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen/Qwen3-VL-4B-Instruct": (
        {"model_type": "qwen3_vl", "text_config": {}, "vision_config": {}},
        "also takes images",
    ),
    "meta-llama/Llama-4-Scout-17B-16E": ({"model_type": "llama4", "vision_config": {}}, "also takes images"),
    "moonshotai/Kimi-K2.5": (
        {
            "model_type": "kimi_k25",
            "text_config": {"model_type": "kimi_k2"},
            "vision_config": {"model_type": "kimi_k25_vision"},
            "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        },
        "'kimi_k25': the model also takes images",
    ),
    "meta-models/Muse-Glimmer-30B": (
        {
            "model_type": "muse_glimmer",
            "text_config": {"model_type": "muse_glimmer_text"},
            "vision_config": {"model_type": "muse_glimmer_vision"},
        },
        "'muse_glimmer': the model also takes images",
    ),
    "meta-models/Muse-Glimmer-30B, its text model": (
        {"model_type": "muse_glimmer_text"},
        "'muse_glimmer_text', which transformers .* has no causal language model for",
    ),
    "Qwen/Qwen3.5-4B": (
        {
            "model_type": "qwen3_5",
            "text_config": {"model_type": "qwen3_5_text"},
            "vision_config": {"model_type": "qwen3_5_vision"},
        },
        "'qwen3_5': the model also takes images",
    ),
    "a Seed-OSS without biases": ({"model_type": "seed_oss", "attention_bias": False}, "asks for no attention_bias"),
    "lmsys/vicuna-7b-v1.5-16k, dynamic": (
        {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        "rope_type 'dynamic'",
    ),
    "a Llama with partial RoPE": ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "a Llama with partial RoPE, by transformers 5": (
        {"model_type": "llama", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
        "partial_rotary_factor 0.75",
    ),
    "Qwen/Qwen2.5-7B-Instruct-1M": (
        {"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 262144}},
        "dual_chunk_attention_config",
    ),
    "a Qwen2 with sliding windows": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096},
        "use_sliding_window",
    ),
    "a Mistral as a Llama": ({"model_type": "llama", "sliding_window": 4096}, "sliding_window"),
    "internlm's Llama with biases": ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
    "RedHatAI/Llama-3.1-8B-Instruct-quantized.w4a16": (
        {"model_type": "llama", "quantization_config": {"quant_method": "compressed-tensors"}},
        "quant_method 'compressed-tensors'",
    ),
    "RedHatAI's FP8 with a scale for each tensor": (
        {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}},
        "fp8 without weight_block_size",
    ),
    "deepseek-ai/DeepSeek-V3.2-Exp": ({"model_type": "deepseek_v32", "index_topk": 2048}, "indexed_attention"),
}
"""config.json of checkpoints that are not supported, and the reason that the user reads."""
