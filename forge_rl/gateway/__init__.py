"""The gateway: OpenAI's and Anthropic's APIs in front of the engines, with each turn recorded token for token."""

from forge_rl.gateway.backend import Backend, GeneratorBackend
from forge_rl.gateway.gateway_config import GatewayConfig
from forge_rl.gateway.http import check_address
from forge_rl.gateway.server import Gateway
from forge_rl.gateway.sessions import Session

__all__ = [
    "Backend",
    "Gateway",
    "GatewayConfig",
    "GeneratorBackend",
    "Session",
    "check_address",
]
