"""Images on this machine: folders of layers, and settings of the processes that run in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge_rl.sandbox.limits import SandboxError

MAX_LAYERS = 500
"""Lower folders that one overlay of Linux can have."""
_MAX_WORDS = 10_000
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ImageError(SandboxError):
    """An image that does not exist, cannot be fetched, is refused, or does not fit into the store."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Settings of an image for the processes that run in it. Written by the image's author: not to be trusted."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables by name."""
    user: str = ""
    """NAME, UID, or either with :GROUP; empty for root. Names are of the image's own /etc/passwd."""
    working_folder: str = "/"
    """Absolute; it may not exist in the image."""
    entrypoint: Sequence[str] = ()
    """Words before the command."""
    command: Sequence[str] = ()
    """Words of the default command."""


@dataclass(frozen=True, kw_only=True)
class ContainerImage:
    """An image whose layers are on this machine.

    The layers are lower folders of an overlay that is mounted with `userxattr`: a file that a layer deletes is a
    device 0:0, and a folder that hides the same folder of lower layers has the attribute `user.overlay.opaque`. All
    files belong to the store's owner, not to their owner in the image: sessions map this one user to theirs.
    Set-user-id bits and devices are taken out; `owners.json`, next to each layer, records them.
    """

    reference: str
    """Its name, as the caller wrote it."""
    digest: str
    """Digest of the manifest for this machine's kind of processor, or of the configuration if a `docker save` archive
    has no manifest: "sha256:" and 64 digits."""
    layers: tuple[Path, ...]
    """Read-only folders, the lowest first."""
    settings: ImageSettings


def check_digest(value: object, place: str) -> str:
    """Return a digest that can be part of a path.

    Raises:
        ImageError: it is not "sha256:" and 64 hexadecimal digits.
    """
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ImageError(f"{place} is {value!r:.100}, not a digest", hint="only sha256 digests are supported")
    return value


def settings_of(config: Mapping[str, object], name: str) -> ImageSettings:
    """Read an image's configuration, the JSON object that its manifest names.

    Args:
        name: name of the image, for errors.

    Raises:
        ImageError: a value has another type than in the specification of images.
    """
    values = config.get("config") or {}
    if not isinstance(values, dict):
        raise ImageError(f"{name}: its configuration's config is not an object: {values!r:.100}")
    env = [entry.partition("=") for entry in _words(values, "Env", name)]
    working_folder = _text(values, "WorkingDir", name) or "/"
    return ImageSettings(
        env={key: value for key, _, value in env if key},
        user=_text(values, "User", name),
        working_folder=working_folder if working_folder.startswith("/") else f"/{working_folder}",
        entrypoint=_words(values, "Entrypoint", name),
        command=_words(values, "Cmd", name),
    )


def _text(values: Mapping[str, object], key: str, name: str) -> str:
    value = values.get(key) or ""
    if not isinstance(value, str) or "\0" in value:
        raise ImageError(f"{name}: its configuration's {key} is not text: {value!r:.100}")
    return value


def _words(values: Mapping[str, object], key: str, name: str) -> tuple[str, ...]:
    words = values.get(key) or []
    if (
        not isinstance(words, list)
        or len(words) > _MAX_WORDS
        or not all(isinstance(word, str) and "\0" not in word for word in words)
    ):
        raise ImageError(f"{name}: its configuration's {key} is not a list of texts: {words!r:.100}")
    return tuple(words)
