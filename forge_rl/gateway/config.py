"""Configuration of a gateway: where it listens, who may ask, and how much at a time."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from forge_rl.errors import ConfigError
from forge_rl.runtime.commands import CommandLimits

AgentSampling: TypeAlias = Literal["replaced", "untrained", "trained"]


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Configures the HTTP server before the engines: `GatewayConfig(port=8000)`."""

    host: str = "127.0.0.1"
    """Address to listen on. Other machines reach the gateway only on another one, such as 0.0.0.0."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    api_key_file: Path | None = None
    """File with the key that requests must carry, in a run besides the keys of its episodes. It must be this user's
    alone (chmod 600)."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which requests may call the gateway in their Host header, besides those of loopback and the address that
    it listens on; * allows all. Web pages that rebind their own name to the gateway are refused by it."""
    allowed_origins: tuple[str, ...] = ()
    """Origins such as https://chat.example whose web pages may use the gateway from a browser; * allows all."""
    aliases: tuple[str, ...] = ()
    """Other names for the model, such as the one that an agent asks for."""
    tool_parser: str = ""
    """Name of vLLM's parser for the model's way to write tool calls; by default that which fits its chat template."""
    reasoning_parser: str = ""
    """Name of vLLM's parser that tells the model's thoughts from its answer; "" leaves them in its text."""
    agent_sampling: AgentSampling = "replaced"
    """Sampling settings of agents in a run, such as temperature, top_p and forced tools or JSON: replaced by the run's;
    honoured in turns that are then untrained; or honoured and trained, with the logprobs of the settings that were."""
    max_body_bytes: int = 4 << 20
    """Longest body of a request. English text has four bytes a token."""
    max_concurrent: int = 4096
    """Most completions that are decoded at a time in a session, and outside of sessions all together; more requests are
    refused with status 429. The number of sessions is bounded by a run's schedule."""
    client_deadline_s: float = 60.0
    """Longest time that a client may take to send its request, or to read what is sent to it."""

    session_turns: int = 1000
    """Most completions of a session, which is an agent's attempt at a task; all are kept until it ends. More requests
    are refused, and the attempt is truncated."""
    session_tokens: int = 1 << 24
    """Most tokens of all its completions and their prompts together."""

    agent_deadline_s: float = 3600.0
    """Longest time for an agent's attempt at a task, without the time for which it waits for an engine or is paused. If
    it came back to the policy again and again, the attempt is truncated, and scored; else the agent hangs."""

    agent_limits: CommandLimits = field(default_factory=CommandLimits)
    """Resources that each process of an agent may use that runs in processes of its own."""

    def __post_init__(self) -> None:
        for flag, value, good, hint in (
            ("port", self.port, 0 <= self.port < 65536, "a port from 0 to 65535"),
            ("host", self.host, bool(self.host), "an address, usually 127.0.0.1"),
            (
                "allowed-origins",
                self.allowed_origins,
                all(origin == "*" or "://" in origin for origin in self.allowed_origins),
                "origins with their scheme, such as https://chat.example",
            ),
            (
                "allowed-hosts",
                self.allowed_hosts,
                not any(set(host) & set("/:@ ") for host in self.allowed_hosts),
                "names without scheme and port, such as gateway.example",
            ),
            ("max-body-bytes", self.max_body_bytes, self.max_body_bytes >= 1024, "1024 or more"),
            ("max-concurrent", self.max_concurrent, self.max_concurrent >= 1, "1 or more"),
            ("session-turns", self.session_turns, self.session_turns >= 1, "1 or more"),
            ("session-tokens", self.session_tokens, self.session_tokens >= 1, "1 or more"),
            ("client-deadline-s", self.client_deadline_s, self.client_deadline_s > 0, "a value above 0"),
            ("agent-deadline-s", self.agent_deadline_s, self.agent_deadline_s > 0, "a value above 0"),
        ):
            if not good:
                raise ConfigError(f"the gateway's {flag} is {value!r}", hint=f"set its {flag} to {hint}")

    @property
    def is_public(self) -> bool:
        """True if other machines may reach it."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may mean anything
            return True
