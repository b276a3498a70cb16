"""Families of models that the trainer knows, one file each.

A file has three things: what config.json says of the architecture and what of it is refused, the names of the weights,
and how torchtitan builds and shards the model, whose imports stand inside functions, so that config.json can be read
where no torchtitan is wanted. The next family is one more file, and a line here.
"""

from forge_rl.engines.families.config import Family
from forge_rl.engines.families.deepseek_v3 import DEEPSEEK_V3
from forge_rl.engines.families.gpt_oss import GPT_OSS
from forge_rl.engines.families.llama import LLAMA
from forge_rl.engines.families.qwen2 import QWEN2
from forge_rl.engines.families.qwen3 import QWEN3
from forge_rl.engines.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GPT_OSS, DEEPSEEK_V3)
}
"""By model_type of config.json."""
