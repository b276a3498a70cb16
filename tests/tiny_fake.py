"""The tiny recipe on engines without vLLM, which start in a moment: for runs in which something else is looked at.

FORGE_RL_FAKE_ENGINES=FOLDER python -m tests.tiny_fake --model FOLDER --out FOLDER ...
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial

from forge_rl import Task, launch
from forge_rl.rewards.reward_flag import RewardTexts
from forge_rl.services.generator import Generator
from forge_rl.services.weight_store_config import WeightStoreConfig
from recipes import grpo
from tests import tiny
from tests.fake_engine import FakeEngine

_TURNS = itertools.count()


def in_turns(task: Task, text: str) -> float:
    """A reward that the equal completions of a fake engine differ in."""
    return float(next(_TURNS) % 2)


@dataclass(frozen=True, kw_only=True)
class Config(tiny.Config):
    """GRPO on a tiny model that nothing is decoded with."""

    rewards: RewardTexts = ("tests.tiny_fake:in_turns",)
    weights: WeightStoreConfig = field(default_factory=lambda: WeightStoreConfig(probes=0))  # nothing computes logprobs


if __name__ == "__main__":
    Generator.start = partial(Generator.start, actor=FakeEngine)  # type: ignore[method-assign]
    launch(Config, grpo.main)
