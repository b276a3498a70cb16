"""Qwen2: Llama with biases on q, k and v."""

from functools import partial

from forge_rl.engines.families.family import ConfigFile, Family
from forge_rl.engines.families.llama import LAYER, titan
from forge_rl.weights.names import Names

_BIAS = {f"attention.qkv_linear.w{one}.bias": f"self_attn.{one}_proj.bias" for one in "qkv"}

QWEN2 = Family(
    model_type="qwen2",
    read=ConfigFile.architecture,
    names=Names(layer=LAYER | _BIAS),
    titan=partial(titan, qkv_bias=True),
)
