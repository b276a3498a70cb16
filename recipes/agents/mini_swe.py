"""Runs mini-swe-agent, unmodified, on a task in its container: python mini_swe.py [-c CONFIG ...] < task.json

With the Python of an environment that has mini-swe-agent, for `recipes.agent_command`:

python -m recipes.agent_command --env harbor:tasks --command "mini-env/bin/python recipes/agents/mini_swe.py"

It is mini-swe-agent's own command, whose `docker` environment runs commands by the program FORGE_RL_CONTAINER instead
of Docker's. Its requests go to OPENAI_BASE_URL, which litellm reads for models named openai/NAME.
"""

import json
import os
import sys

task = json.load(sys.stdin)["messages"][-1]["content"]
settings = {
    "environment.environment_class": "docker",
    "environment.executable": os.environ["FORGE_RL_CONTAINER"],
    "environment.image": "the-tasks",
    "environment.cwd": "",  # the image's working folder
    "environment.timeout": 600,  # the environment's timeout_s ends commands before
    "model.model_class": "litellm_textbased",  # commands in fenced blocks; "litellm" for models that call tools
    "model.cost_tracking": "ignore_errors",  # the policy has no price
}
command = [sys.executable, "-m", "minisweagent", "--yolo", "--exit-immediately", "--agent-class", "default"]
command += ["--model", f"openai/{os.environ['FORGE_RL_MODEL']}", "--task", task, "--output", os.devnull]
for name, value in settings.items():
    command += ["-c", f"{name}={json.dumps(value)}"]
command += sys.argv[1:] or ["-c", "mini_textbased.yaml"]  # the last has precedence
variables = {"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
os.execve(command[0], command, {**os.environ, **variables})
