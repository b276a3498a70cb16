"""The gateway: OpenAI's and Anthropic's APIs in front of the engines, with each turn recorded token for token.

    async with Gateway(GatewayConfig(), backend, tokenizer) as gateway:
        session = gateway.open()

Names are imported on first use: most runs need none of them.
"""

from forge_rl.system.lazy import lazy_package

__all__, __getattr__ = lazy_package(__name__, __file__)
