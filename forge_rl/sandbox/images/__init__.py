"""Images: OCI and Docker images as folders of layers, fetched and unpacked once for all sessions of a machine.

    store = ImageStore(Path("~/.cache/forge_rl/images"))
    async with store.use("docker.io/library/debian:12") as image:
        print(image.layers, image.settings.env)

Names are imported on first use: the program that unpacks a layer imports neighbours of this file without httpx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_rl.system.lazy import LazyNames

if TYPE_CHECKING:
    from forge_rl.sandbox.images.image import ContainerImage as ContainerImage
    from forge_rl.sandbox.images.image import ImageError as ImageError
    from forge_rl.sandbox.images.image import ImageSettings as ImageSettings
    from forge_rl.sandbox.images.peers import LayerPeers as LayerPeers
    from forge_rl.sandbox.images.store import ImageStore as ImageStore

_NAMES: LazyNames[object] = LazyNames(
    {
        "ContainerImage": "forge_rl.sandbox.images.image:ContainerImage",
        "ImageError": "forge_rl.sandbox.images.image:ImageError",
        "ImageSettings": "forge_rl.sandbox.images.image:ImageSettings",
        "ImageStore": "forge_rl.sandbox.images.store:ImageStore",
        "LayerPeers": "forge_rl.sandbox.images.peers:LayerPeers",
    }
)
__all__ = ["ContainerImage", "ImageError", "ImageSettings", "ImageStore", "LayerPeers"]


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _NAMES[name]
