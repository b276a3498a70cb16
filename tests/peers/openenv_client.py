"""What OpenEnv's own client sees of a world of ours, as JSON: python openenv_client.py URL."""

import json
import sys

from openenv.core.generic_client import GenericEnvClient

with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    first = env.reset(seed=3)
    again = env.reset(seed=3)
    tools = env.step({"type": "list_tools"})
    called = env.step({"type": "call_tool", "tool_name": "calculator", "arguments": {"expression": "6*7"}})
    last = env.step({"message": "42"})
    try:
        env.step({"message": "again"})
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    state = env.state()
print(
    json.dumps(
        {
            "same": first.observation["messages"] == again.observation["messages"],
            "question": first.observation["text"],
            "tools": [tool["name"] for tool in tools.observation["tools"]],
            "called": [called.observation["text"], called.done],
            "last": [last.reward, last.done],
            "refused": refused,
            "steps": state["step_count"],
        }
    )
)
