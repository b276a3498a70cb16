"""The agent's recipe with a reward that a random model's completions differ in.

python -m tests.tiny_agent --model FOLDER --out FOLDER ...
"""

from __future__ import annotations

from dataclasses import dataclass

from forge_rl import launch
from forge_rl.rewards.reward_flag import RewardTexts
from recipes import agent_openai


@dataclass(frozen=True, kw_only=True)
class Config(agent_openai.Config):
    """The agent's recipe on a tiny model."""

    rewards: RewardTexts = ("tests.tiny:share_of_vowels",)


if __name__ == "__main__":
    launch(Config, agent_openai.main)
