"""Configuration of a gateway: address, access and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeAlias

from forge_rl.errors import ConfigError, check_flags
from forge_rl.flags.categories import Category
from forge_rl.runtime.commands import CommandLimits

AgentSampling: TypeAlias = Literal["replaced", "untrained", "trained"]


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Configures the HTTP server in front of the engines: `GatewayConfig(port=8000)`."""

    CATEGORY: ClassVar[Category] = Category.OPERATIONAL

    host: str = "127.0.0.1"
    """Address to listen on. The default serves only this machine; 0.0.0.0 serves others too."""
    port: int = 0
    """Port to listen on; 0 picks a free one."""
    api_key_file: Path | None = None
    """File with the API key for requests; episodes of a run have their own keys. No other user may have access to it
    (chmod 600)."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names accepted in requests' Host header, besides loopback and the listening address; * accepts all. This
    blocks DNS rebinding by web pages."""
    allowed_origins: tuple[str, ...] = ()
    """Origins, such as https://chat.example, of web pages that may use the gateway from a browser; * accepts all."""
    aliases: tuple[str, ...] = ()
    """Other names for the model, such as the one that an agent requests."""
    tool_parser: str = ""
    """Name of vLLM's tool parser; by default the one that reads back the calls that the chat template writes."""
    reasoning_parser: str = ""
    """Name of vLLM's reasoning parser, which separates thoughts from the answer; by default the one that reads back
    the thoughts that the model's chat template writes, if it writes any. none leaves thoughts in the text."""
    agent_sampling: AgentSampling = "replaced"
    """Treatment of agents' sampling settings in a run, such as temperature, top_p and forced tools or JSON. replaced:
    use the run's settings; untrained: honour the agent's, and do not train on these turns; trained: honour them, and
    train with the logprobs under them."""
    max_body_bytes: int = 4 << 20
    """Maximum bytes of a request's body. English text has about four bytes per token."""
    max_concurrent: int = 4096
    """Maximum concurrent completions per session, and of all requests outside of sessions together; further requests
    are refused with status 429. A run's schedule bounds the number of sessions."""
    client_deadline_s: float = 60.0
    """Maximum time for a client to send its request, or to read data already sent to it."""

    session_turns: int = 1000
    """Maximum completions of a session, which is one episode of an agent; all are kept until it ends. Further requests
    are refused, and the episode is truncated."""
    session_tokens: int = 1 << 24
    """Maximum tokens of a session: all completions and their prompts together."""

    agent_deadline_s: float = 3600.0
    """Maximum time of an agent's episode, without waits for an engine and pauses. After it, the episode is truncated
    and scored; it fails if the agent did not call the policy in the last half of the time."""

    agent_limits: CommandLimits = field(default_factory=CommandLimits)
    """Resource limits of each process, for agents that run in their own processes."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "the gateway's ",
            minimum={"port": 0, "max_body_bytes": 1024, "max_concurrent": 1, "session_turns": 1, "session_tokens": 1},
            above={"client_deadline_s": 0, "agent_deadline_s": 0},
            below={"port": 65536},
        )
        for flag, value, is_valid, hint in (
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
        ):
            if not is_valid:
                raise ConfigError(f"the gateway's {flag} is {value!r}", hint=f"set its {flag} to {hint}")

    def with_parser(self, name: str) -> Self:
        """Return these settings with a run's tool parser; "" leaves them as they are.

        Raises:
            ConfigError: both name one, and not the same.
        """
        if name and self.tool_parser not in ("", name):
            raise ConfigError(
                f"--tool-parser is {name}, and --gateway.tool-parser is {self.tool_parser}", hint="set one of them"
            )
        return replace(self, tool_parser=name or self.tool_parser)

    @property
    def is_public(self) -> bool:
        """True if other machines may reach the gateway."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may resolve to any address
            return True
