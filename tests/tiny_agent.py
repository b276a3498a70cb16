"""The agent's recipe with a reward that a random model's answers differ in.

python -m tests.tiny_agent --model FOLDER --out FOLDER ...
"""

from __future__ import annotations

from functools import partial

from forge_rl import launch, start
from recipes import agent_openai
from tests.tiny import share_of_vowels

if __name__ == "__main__":
    agent_openai.start = partial(start, reward=share_of_vowels)  # type: ignore[assignment]
    launch(agent_openai.Config, agent_openai.main)
