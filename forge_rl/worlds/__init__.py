"""Worlds: environments that run what a model writes, and adapters to third-party environments and tools.

    environment = ShellEnv()
    async with start(config, loss=loss, sources=sources, reward=UnitTests(), environment=environment) as run:

Names are imported on first use. The core reaches them by the flags --env and --reward.
"""

from forge_rl.system.lazy import lazy_package

__all__, __getattr__ = lazy_package(__name__, __file__)
