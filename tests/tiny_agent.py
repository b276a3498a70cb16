"""The agent's recipe with a verifier that a random model's completions differ in.

python -m tests.tiny_agent --model FOLDER --out FOLDER ...
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forge_rl import launch
from forge_rl.rewards.verifiers import ReasoningGymReward
from recipes import agent_openai
from tests.tiny import ShareOfVowels


@dataclass(frozen=True, kw_only=True)
class Config(agent_openai.Config):
    """The agent's recipe on a tiny model."""

    verifier: ReasoningGymReward = field(default_factory=ShareOfVowels)


if __name__ == "__main__":
    launch(Config, agent_openai.main)
