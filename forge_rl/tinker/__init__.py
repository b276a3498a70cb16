"""The Tinker API: many people train and sample adapters over one base, with the unmodified `tinker` client.

    async with TinkerServer(TinkerConfig(), base, keys, services) as server:
        print(server.url)

Names are imported on first use. The package `tinker` of the registry is the client's, and is not imported here.
"""

from forge_rl.system.lazy import lazy_package

__all__, __getattr__ = lazy_package(__name__, __file__)
