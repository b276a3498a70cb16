"""Public names of the gateway."""

from forge_rl.gateway.agent_command import AgentCommand as AgentCommand
from forge_rl.gateway.agents import Agent as Agent
from forge_rl.gateway.agents import serving_agents as serving_agents
from forge_rl.gateway.gateway_config import GatewayConfig as GatewayConfig
from forge_rl.gateway.http import check_address as check_address
from forge_rl.gateway.server import Gateway as Gateway
from forge_rl.gateway.sessions import Session as Session
from forge_rl.services.policy_backend import Backend as Backend
from forge_rl.services.policy_backend import GeneratorBackend as GeneratorBackend
