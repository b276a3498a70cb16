"""Seed-OSS: Llama with biases on q, k and v, and an independent head dimension."""

from __future__ import annotations

from forge_rl.engines.families.family import Architecture, ConfigFile, Family
from forge_rl.engines.families.qwen import QWEN2


def _read(config: ConfigFile) -> Architecture:
    """Read the dimensions; refuse a model without these biases, or with one on the output."""
    values = config.values
    return config.architecture(
        unsupported={
            "attention_bias": False,
            "no attention_bias": not values.get("attention_bias", True),
            "attention_out_bias": bool(values.get("attention_out_bias")),
        },
        head_dim=config.whole("head_dim", 128),
    )


SEED_OSS = Family(
    model_type="seed_oss", read=_read, names=QWEN2.names, layer=QWEN2.layer, set_sharding=QWEN2.set_sharding
)
