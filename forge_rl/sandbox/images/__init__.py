"""Images: OCI and Docker images as folders of layers, fetched and unpacked once for all sessions of a machine."""

from forge_rl.sandbox.images.image import Image as Image
from forge_rl.sandbox.images.image import ImageError as ImageError
from forge_rl.sandbox.images.image import ImageSettings as ImageSettings
