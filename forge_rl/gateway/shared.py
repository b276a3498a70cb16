"""Objects that the parts of a gateway share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forge_rl.gateway.constraints import ConstraintChecker
from forge_rl.gateway.gateway_config import GatewayConfig
from forge_rl.gateway.reading import Reader
from forge_rl.services.policy_backend import Backend
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.tokens.tool_parsers import ToolParser


@dataclass(frozen=True, kw_only=True)
class GatewayContext:
    """Objects that a gateway's engine client, prompt renderer and handlers share."""

    config: GatewayConfig
    backend: Backend
    """Decodes completions."""
    tokenizer: Tokenizer
    """The model's tokenizer."""
    reader: Reader
    """Runs the work that grows with a request's length."""
    constraints: ConstraintChecker
    """Checks constraints on completions."""
    parser: ToolParser
    """The tool parser, loaded."""
    replaced: Callable[[str], None]
    """Called with the name of each setting of an agent that the session's sampling replaces."""
