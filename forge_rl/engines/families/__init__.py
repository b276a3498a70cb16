"""Model families that the trainer supports.

A family reads the architecture from config.json and refuses unsupported options, names the weights, and has torchtitan
build and shard its layers. It imports torchtitan inside functions, so that config.json can be read without it. To add
one, add a file and its name here.
"""

from forge_rl.engines.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from forge_rl.engines.families.family import Family
from forge_rl.engines.families.gpt_oss import GPT_OSS
from forge_rl.engines.families.llama import LLAMA
from forge_rl.engines.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from forge_rl.engines.families.seed_oss import SEED_OSS

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GPT_OSS, DEEPSEEK_V3, SEED_OSS)
}
"""Families by the model_type of config.json."""

NATIVE_TYPES: dict[str, Family] = FAMILIES | {KIMI_K2.model_type: KIMI_K2}
"""FAMILIES, plus model types that are another family's in all but name."""
