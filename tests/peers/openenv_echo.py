"""A world of the openenv package for tests, made as its own echo example is: python openenv_echo.py PORT."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("echo")

        @server.tool
        def echo_message(message: str) -> str:
            """Echo a message."""
            return message

        super().__init__(server)
        self._state = State(episode_id="echo", step_count=0)

    def reset(self, seed=None, episode_id=None, **others):
        return Observation(done=False, reward=0.0, metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **others):
        return Observation(done=False, reward=0.0, metadata={"error": "unknown action"})

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_app(Echo, CallToolAction, CallToolObservation, env_name="echo", max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
