"""A model and a recipe so small that whole runs on real services take seconds.

python -m tests.tiny --model FOLDER --out FOLDER ...
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from forge_rl import Task, launch
from forge_rl.rewards.reward_flag import RewardTexts
from forge_rl.rollout.evaluation import EvalConfig
from recipes import grpo


def make_tiny_model(
    folder: Path, tokenizer_from: Path, *, tied: bool = True, family: str = "llama", **config: object
) -> Path:
    """A random model of 3 M parameters with the bundled model's tokenizer; a Llama if nothing else is said."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    given: dict[str, object] = {
        "vocab_size": 49152,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given | config)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def share_of_vowels(task: Task, text: str) -> float:
    """A reward that a random model's completions differ in."""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


@dataclass(frozen=True, kw_only=True)
class Config(grpo.Config):
    """GRPO on a tiny model."""

    tasks: tuple[str, ...] = ("chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1",)
    rewards: RewardTexts = ("tests.tiny:share_of_vowels",)
    groups_per_batch: int = 2
    group_size: int = 4
    evaluation: EvalConfig = field(default_factory=lambda: EvalConfig(tasks=4))
    steps: int = 4


if __name__ == "__main__":
    launch(Config, grpo.main)
