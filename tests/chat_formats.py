"""Chat formats of the checkpoints that `benchmarks.models` lists, and the parsers that must be chosen for them.

The templates are our own and short. They write turns, calls, outputs of tools and thoughts as the published templates
do: the same control tokens and markers, order, blanks and ids. Texts that only instruct the model are left out.
"""

from __future__ import annotations

import json
from pathlib import Path

from forge_rl.tokens.tokenizer import Tokenizer
from tests import chatml_formats as chatml
from tests import vendor_formats as vendor
from tests.chat_templates import Format
from tests.zoo.checkpoints import CHECKPOINTS
from tests.zoo.general import GENERAL

FORMATS: dict[str, Format] = {
    "Qwen/Qwen3-0.6B": chatml.QWEN3,
    "Qwen/Qwen3-30B-A3B": chatml.QWEN3,
    "Qwen/Qwen2.5-7B": chatml.HERMES,
    "meta-llama/Llama-3.2-1B-Instruct": vendor.LLAMA3,
    "unsloth/gpt-oss-20b-BF16": vendor.HARMONY,
    "moonshotai/Moonlight-16B-A3B-Instruct": vendor.MOONLIGHT,
    "moonshotai/Kimi-K2-Instruct, with a tokenizer.json": vendor.KIMI2,
    "ByteDance-Seed/Seed-OSS-36B-Base": vendor.SEED,
    "mistralai/Mistral-7B-v0.1": vendor.NO_TEMPLATE,
    "mistralai/Mistral-7B-Instruct-v0.3": vendor.mistral_v3(" "),
    "mistralai/Ministral-8B-Instruct-2410": vendor.mistral_v3(""),
    "mistralai/Ministral-3-3B-Instruct-2512, its text model": vendor.MINISTRAL3,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": vendor.MIXTRAL,
    "google/gemma-2-2b-it": vendor.gemma("{{ raise_exception('no system messages') }}"),
    "google/gemma-3-1b-it": vendor.gemma("<start_of_turn>user\n{{ m.content }}\n\n"),
    "microsoft/Phi-3-mini-4k-instruct": vendor.PHI3,
    "microsoft/phi-4": chatml.PHI4,
    "allenai/OLMo-2-0425-1B-Instruct": vendor.OLMO2,
    "allenai/Olmo-3-7B-Instruct": chatml.OLMO3,
    "HuggingFaceTB/SmolLM3-3B": chatml.SMOLLM3,
    "ibm-granite/granite-3.3-2b-instruct": vendor.GRANITE3,
    "zai-org/GLM-4-9B-0414": vendor.GLM4,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": vendor.SEED,
    "baidu/ERNIE-4.5-0.3B-PT": vendor.ERNIE,
    "Qwen/Qwen3.5-4B, its text model": chatml.QWEN35,
    "ibm-granite/granite-4.0-h-1b": vendor.GRANITE4,
    "LiquidAI/LFM2-1.2B": chatml.LFM2,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": chatml.HERMES,
    "Qwen/Qwen3.5-35B-A3B, its text model": chatml.QWEN35,
    "zai-org/GLM-4.5-Air": vendor.GLM45,
    "zai-org/GLM-4.7-Flash": vendor.GLM47,
    "MiniMaxAI/MiniMax-M2": vendor.MINIMAX,
    "baidu/ERNIE-4.5-21B-A3B-PT": vendor.ERNIE,
    "LiquidAI/LFM2-8B-A1B": chatml.LFM2,
    "arcee-ai/Trinity-Nano-Preview": chatml.HERMES,
    "ibm-granite/granite-4.0-h-tiny": vendor.GRANITE4,
    "google/gemma-4-E2B-it, its text model": vendor.GEMMA4,
    "google/gemma-4-31B-it, its text model": vendor.GEMMA4,
    "google/gemma-4-26B-A4B-it, its text model": vendor.GEMMA4,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct, its text model": vendor.LLAMA4,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": vendor.NEMOTRON2,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": chatml.NEMOTRON3,
    "Qwen/Qwen3-30B-A3B, on transformers' code": chatml.QWEN3,
    "internlm's Llama with biases, on transformers' code": chatml.INTERNLM,
}
"""By checkpoint."""


def tokenizer_of(name: str, small_tokenizer: Path, folder: Path) -> Tokenizer:
    """Write the small tokenizer with the tokens and the template of a checkpoint, and load it.

    Raises:
        ModelError: the checkpoint has no template.
    """
    from transformers import AutoTokenizer

    chat_format, checkpoint = FORMATS[name], (CHECKPOINTS | GENERAL)[name]
    hf = AutoTokenizer.from_pretrained(small_tokenizer)
    hf.add_special_tokens({"additional_special_tokens": list(chat_format.special)})
    hf.add_tokens(list(chat_format.tags))
    hf.bos_token, hf.eos_token = chat_format.special[0], chat_format.stops[-1]
    hf.chat_template = chat_format.template or None
    hf.save_pretrained(folder)
    stops = hf.convert_tokens_to_ids(list(chat_format.stops))
    config = {"model_type": checkpoint.config.get("model_type", checkpoint.family), "vocab_size": len(hf)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return Tokenizer(folder)
