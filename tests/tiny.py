"""A model and a recipe so small that whole runs on real services take seconds.

python -m tests.tiny --model FOLDER --out FOLDER ...
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl import Task, launch
from forge_rl.models.bundled import bundled_model, default_cache
from forge_rl.rewards.reward_flag import RewardTexts
from forge_rl.rollout.evaluation import EvalConfig
from recipes import grpo

if TYPE_CHECKING:
    from forge_rl.tokens.tokenizer import Tokenizer

SMALL_VOCABULARY = 1024
RUN_VOCABULARY = 8192
"""Tokens of the model of whole runs: a sixth of the bundled model's, and prompts hardly become longer."""


@functools.cache
def bundled_folder() -> Path:
    """The bundled model's folder; its 270 MB are checked once a process, which takes a fifth of a second."""
    return bundled_model(default_cache())


@functools.cache
def bundled_tokenizer() -> Tokenizer:
    """The bundled model's tokenizer; reading it takes most of a second, so tests of other things share one."""
    from forge_rl.tokens.tokenizer import Tokenizer

    return Tokenizer(bundled_folder())


def make_small_tokenizer(folder: Path, vocabulary: int = SMALL_VOCABULARY) -> Path:
    """Write the bundled model's tokenizer, cut to its first tokens, into a folder with its other settings.

    With 1024 tokens it loads in a hundredth of a second, the whole one in most of a second. Its tokens have the same
    ids; long words are spelled in pieces.
    """
    folder.mkdir(parents=True)
    tokenizer = json.loads((bundled_folder() / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: index for token, index in model["vocab"].items() if index < vocabulary}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((bundled_folder() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocabulary}))
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(bundled_folder() / name, folder / name)
    return folder


def make_tiny_model(
    folder: Path, tokenizer_from: Path, *, tied: bool = True, family: str = "llama", **config: object
) -> Path:
    """A random model of 3 M parameters with the bundled model's tokenizer; a Llama if nothing else is said."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    options: dict[str, object] = {
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
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options | config)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def make_run_model(folder: Path, *, tied: bool = True, family: str = "llama", **config: object) -> Path:
    """A model as by `make_tiny_model` with few tokens, whose logits and tokenizer take a run less time."""
    tokenizer = make_small_tokenizer(folder / "tokenizer", RUN_VOCABULARY)
    return make_tiny_model(
        folder / "tiny", tokenizer, tied=tied, family=family, **{"vocab_size": RUN_VOCABULARY} | config
    )


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


main = grpo.main

if __name__ == "__main__":
    launch(Config, main)
