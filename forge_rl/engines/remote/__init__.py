"""Engines that somebody else started: `server.py` is added to their vLLM server, and `engine.py` decodes there over
HTTP.

Neither end trusts the other's bytes: messages are JSON or raw tensors, never pickles. Every request needs the key in
the environment variable KEY_VARIABLE.
"""

from dataclasses import dataclass

PROTOCOL = 2
"""Version of the protocol between the two ends."""
PREFIX = "/forge_rl/v1/"
"""Path prefix of all routes."""
KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key, on both ends: the one that vLLM reads for its own routes."""
SESSION_HEADER = "x-forge-rl-session"


@dataclass(frozen=True, kw_only=True)
class RemoteServer:
    """A vLLM server with forge_rl's routes."""

    url: str
    owner: str
    """Random name of the run, so that two runs do not load their weights into one engine."""
    wait_s: float = 0.0
    """Seconds to wait for a server that does not answer."""
