"""Names of images: in a registry, in a file or folder, or to be built of a Dockerfile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from forge_rl.sandbox.images.image import ImageError, check_digest

DOCKER_HUB = "docker.io"
_HUB_HOST = "registry-1.docker.io"
_PLACES = ("oci", "oci-archive", "docker-archive", "dockerfile")
_HOST = re.compile(r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]{0,252})|\[[0-9a-fA-F:]{2,39}\])(?::[0-9]{1,5})?")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[\w][\w.-]{0,127}", re.ASCII)
LOOPBACK = re.compile(r"(?:localhost|127(?:\.[0-9]+){3}|\[::1\])(?::[0-9]+)?")
"""Hosts of this machine, with or without a port."""
_HINT = "write REGISTRY/NAME:TAG, NAME@sha256:DIGEST, oci:FOLDER, docker-archive:FILE, oci-archive:FILE or " + (
    "dockerfile:FOLDER"
)


@dataclass(frozen=True, kw_only=True)
class RegistryReference:
    """An image in a registry."""

    registry: str
    """Host, and its port if it has one."""
    repository: str
    tag: str
    digest: str
    """"sha256:..."; "" if only the tag is given."""

    @property
    def tag_or_digest(self) -> str:
        """The name that a registry is asked for: the digest, or else the tag."""
        return self.digest or self.tag

    @property
    def address(self) -> str:
        """URL of the registry; those on this machine are spoken to without TLS."""
        host = _HUB_HOST if self.registry == DOCKER_HUB else self.registry
        return f"{'http' if LOOPBACK.fullmatch(host) else 'https'}://{host}"


@dataclass(frozen=True, kw_only=True)
class LocalReference:
    """An image in a file or folder of this machine."""

    kind: str
    """"oci", "oci-archive", "docker-archive" or "dockerfile"."""
    path: Path
    tag: str
    """Name of the image if the place has several; "" for the only one."""


def parse_reference(text: str) -> RegistryReference | LocalReference:
    """Read the name of an image.

        parse_reference("debian:12")  # docker.io/library/debian, tag 12
        parse_reference("oci:build/layout:latest")

    Raises:
        ImageError: it is none; the message leaves out what may be a password.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind in _PLACES:
        path, _, tag = rest.partition(":")
        if not path or (tag and kind == "dockerfile"):
            raise ImageError(f"the image {text!r:.200} names no {'folder' if kind == 'oci' else 'file'}", hint=_HINT)
        return LocalReference(kind=kind, path=Path(path).expanduser().absolute(), tag=tag)
    # The text may hold a password, so that the error does not show it.
    if "://" in text or "@" in text.partition("@sha256:")[0]:
        raise ImageError("the name of an image is a URL or has a user in it", hint=_HINT)
    name, at_sign, digest = text.partition("@")
    if at_sign:
        check_digest(digest, f"the digest of {name!r:.200}")
    host, slash, repository = name.partition("/")
    # Docker's rule: the first part is a host only if it looks like one, and names without a slash are of its library.
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, repository = DOCKER_HUB, name if slash else f"library/{name}"
    repository, colon, tag = repository.partition(":")
    if not (
        _HOST.fullmatch(host)
        and len(repository) <= 255
        and _REPOSITORY.fullmatch(repository)
        and (not colon or _TAG.fullmatch(tag))
    ):
        raise ImageError(f"{text!r:.200} is not the name of an image", hint=_HINT)
    return RegistryReference(registry=host, repository=repository, tag=tag or "latest", digest=digest)
