"""Published checkpoints without a native family, by name: what their config.json says that others do not. Only sizes
are small, and windows shorter than the episodes."""

from __future__ import annotations

from typing import Any

from tests.zoo.checkpoints import LLAMA3_ROPE, Checkpoint

GENERAL_FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "ministral": {
        "architectures": ["MinistralForCausalLM"],
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "rms_norm_eps": 1e-5,
        "sliding_window": 8,
        "tie_word_embeddings": False,
    },
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
        },
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
        "head_dim": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 256,
        "pad_token_id": 0,
        "resid_pdrop": 0.1,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "layer_types": ["sliding_attention", "full_attention"],
        "rms_norm_eps": 1e-6,
        "sliding_window": 8,
        "tie_word_embeddings": False,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layer_interval": 2,
        "no_rope_layers": [1, 0],
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": True,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.2,
        "embedding_multiplier": 4.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": True,
        "head_dim": 32,
        "pad_token_id": 0,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "seed_oss": {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "ernie4_5": {
        "architectures": ["Ernie4_5ForCausalLM"],
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
}
"""Keys of config.json by model_type, as in `checkpoints.FAMILIES`."""

GENERAL: dict[str, Checkpoint] = {
    "mistralai/Mistral-7B-v0.1": Checkpoint(family="mistral", config={"sliding_window": 8}, shards=2),
    "mistralai/Mistral-7B-Instruct-v0.3": Checkpoint(family="mistral", config={"rope_theta": 1000000.0}, shards=3),
    "mistralai/Ministral-8B-Instruct-2410": Checkpoint(family="ministral", shards=4),
    "mistralai/Ministral-3-3B-Instruct-2512, its text model": Checkpoint(family="ministral3", template="file"),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Checkpoint(family="mixtral", shards=5),
    "google/gemma-2-2b-it": Checkpoint(family="gemma2", stops=("<eos>", "<end_of_turn>")),
    "google/gemma-3-1b-it": Checkpoint(family="gemma3_text", stops=("<eos>", "<end_of_turn>")),
    "microsoft/Phi-3-mini-4k-instruct": Checkpoint(family="phi3", config={"sliding_window": 8}, shards=2),
    "microsoft/phi-4": Checkpoint(family="phi3", config={"sliding_window": None}, shards=6),
    "allenai/OLMo-2-0425-1B-Instruct": Checkpoint(family="olmo2"),
    "allenai/Olmo-3-7B-Instruct": Checkpoint(family="olmo3", shards=3, template="file"),
    "HuggingFaceTB/SmolLM3-3B": Checkpoint(family="smollm3", shards=2, template="file"),
    "ibm-granite/granite-3.3-2b-instruct": Checkpoint(family="granite", shards=2),
    "zai-org/GLM-4-9B-0414": Checkpoint(family="glm4", shards=4, template="file"),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": Checkpoint(family="seed_oss", shards=2, template="file"),
    "baidu/ERNIE-4.5-0.3B-PT": Checkpoint(family="ernie4_5"),
    "Qwen/Qwen3-30B-A3B, on transformers' code": Checkpoint(family="qwen3_moe", shards=4),
    "internlm's Llama with biases, on transformers' code": Checkpoint(
        family="llama", config={**LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}
    ),
}
"""Supported ones."""
