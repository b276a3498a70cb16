"""Public names of the gateway."""

from forge_rl.gateway.backend import Backend as Backend
from forge_rl.gateway.backend import GeneratorBackend as GeneratorBackend
from forge_rl.gateway.gateway_config import GatewayConfig as GatewayConfig
from forge_rl.gateway.http import check_address as check_address
from forge_rl.gateway.server import Gateway as Gateway
from forge_rl.gateway.sessions import Session as Session
