"""Settings of the Tinker API's server: address and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forge_rl.errors import check_flags
from forge_rl.flags.categories import Category
from forge_rl.gateway import GatewayConfig


@dataclass(frozen=True, kw_only=True)
class TinkerConfig:
    """Configures the server: `TinkerConfig(port=8001, max_adapters=4)`."""

    CATEGORY: ClassVar[Category] = Category.OPERATIONAL

    host: str = "127.0.0.1"
    """Address to listen on. The default serves only this machine; 0.0.0.0 serves others too."""
    port: int = 8001
    """Port to listen on; 0 picks a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names accepted in requests' Host header, besides loopback and the listening address; * accepts all. This
    blocks DNS rebinding by web pages."""
    max_body_bytes: int = 16 << 20
    """Maximum bytes of a request's body; the client sends data in requests of at most 5 MB."""
    max_concurrent: int = 1024
    """Maximum HTTP requests of a key at a time; further ones are refused with status 429. Each result that a client
    waits for takes one. A sampling client sends at most a quarter of them at a time."""
    client_deadline_s: float = 60.0
    """Maximum time for a client to send its request, or to read data already sent to it."""
    max_adapters: int = 8
    """Maximum adapters that a key trains at a time."""
    max_total_adapters: int = 32
    """Maximum adapters that all keys together train at a time. The trainer holds all of them, each with the memory of
    the largest rank. --max-adapters below it leaves room for other keys."""
    max_tokens_in_flight: int = 1 << 20
    """Maximum tokens of a key's requests that wait or run: data of passes, and prompts with the most tokens that they
    may sample. Further requests are refused with status 429, after which the client tries again."""
    max_samples: int = 128
    """Maximum samples of a request."""
    max_checkpoints: int = 1000
    """Maximum checkpoints of a key on disk; delete some to save more."""
    max_sessions: int = 100
    """Maximum sessions of a key in which it trains or samples; the one idle longest ends."""
    snapshot_updates: int = 10
    """Updates of an adapter after which its state is written to disk. Requests since then are kept too, and computed
    again after a failure, so that none is lost with any interval."""

    mix_rows: bool = False
    """Compute waiting passes of several adapters in one row where they fit. This is faster for small passes; an
    adapter's results then depend on the others' within rounding, where they are otherwise equal bit for bit."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "--",
            minimum={"port": 0, "max_body_bytes": 1024}
            | dict.fromkeys(("max_concurrent", "max_adapters", "max_total_adapters", "max_samples"), 1)
            | dict.fromkeys(("max_tokens_in_flight", "max_checkpoints", "max_sessions", "snapshot_updates"), 1),
            above={"client_deadline_s": 0},
            below={"port": 65536},
        )

    @property
    def http(self) -> GatewayConfig:
        """Settings of the HTTP server and its guard."""
        return GatewayConfig(
            host=self.host,
            port=self.port,
            allowed_hosts=self.allowed_hosts,
            max_body_bytes=self.max_body_bytes,
            max_concurrent=self.max_concurrent,
            client_deadline_s=self.client_deadline_s,
        )
