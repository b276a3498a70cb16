"""Model families that the trainer supports, one file each.

A file reads the architecture from config.json and refuses unsupported options, names the weights, and has torchtitan
build and shard the model. It imports torchtitan inside functions, so that config.json can be read without it. To add a
family, add a file and a line here.
"""

from forge_rl.engines.families.deepseek_v3 import DEEPSEEK_V3
from forge_rl.engines.families.family import Family
from forge_rl.engines.families.gpt_oss import GPT_OSS
from forge_rl.engines.families.llama import LLAMA
from forge_rl.engines.families.qwen2 import QWEN2
from forge_rl.engines.families.qwen3 import QWEN3
from forge_rl.engines.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GPT_OSS, DEEPSEEK_V3)
}
"""Families by the model_type of config.json."""
