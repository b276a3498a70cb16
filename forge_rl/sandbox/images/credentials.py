"""Credentials for registries, from the files that docker, podman and skopeo keep."""

from __future__ import annotations

import base64
import binascii
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from forge_rl.sandbox.images.image import ImageError
from forge_rl.sandbox.images.references import DOCKER_HUB
from forge_rl.system.variables import environment, value_of

_HUB_KEYS = ("docker.io", "https://index.docker.io/v1/", "index.docker.io")
_HELPER = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HELPER_S = 20.0
_MAX_FILE = 1 << 20


@dataclass(frozen=True, repr=False)
class Credentials:
    """A user and password, which no message shows."""

    user: str
    password: str


def credential_files() -> tuple[Path, ...]:
    """Return the files in which credentials are looked up, in order."""
    variable, runtime = value_of("REGISTRY_AUTH_FILE"), value_of("XDG_RUNTIME_DIR")
    config, docker = value_of("XDG_CONFIG_HOME") or "~/.config", value_of("DOCKER_CONFIG") or "~/.docker"
    places = [variable, f"{runtime}/containers/auth.json" if runtime else ""]
    places += [f"{config}/containers/auth.json", f"{docker}/config.json"]
    return tuple(Path(place).expanduser() for place in places if place)


def credentials_for(registry: str, repository: str, files: tuple[Path, ...]) -> Credentials | None:
    """Return the credentials of the longest name that is a prefix of the repository's, of the first file that has one.

    Raises:
        ImageError: a file exists, but cannot be read.
    """
    for path in files:
        try:
            values = json.loads(_content(path))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError):
            raise ImageError(f"{path} cannot be read as credentials", hint="log in again, or remove it") from None
        if isinstance(values, dict) and (credentials := _of_file(values, registry, repository, path)):
            return credentials
    return None


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_MAX_FILE + 1)
    if len(data) > _MAX_FILE:
        raise ValueError("too large")
    return data


def _of_file(values: Mapping[str, object], registry: str, repository: str, path: Path) -> Credentials | None:
    helpers, auths = values.get("credHelpers"), values.get("auths")
    for key in _keys(registry, repository):
        if isinstance(helpers, dict) and isinstance(helper := helpers.get(key), str):
            return _from_helper(helper, key)
        if isinstance(auths, dict) and isinstance(entry := auths.get(key), dict) and entry.get("auth"):
            try:
                user, colon, password = base64.b64decode(str(entry["auth"])).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                colon = ""
            if not colon:
                raise ImageError(f"{path}: the entry {key!r} is damaged", hint="log in again")
            # docker trims NULs as well.
            return Credentials(user, password.rstrip("\0"))
    if isinstance(store := values.get("credsStore"), str) and store:
        keys = _HUB_KEYS[1:2] if registry == DOCKER_HUB else (registry,)
        return _from_helper(store, keys[0])
    return None


def _keys(registry: str, repository: str) -> Iterator[str]:
    # From the whole name to its first part, and then the registry in the forms that tools write.
    parts = repository.split("/")
    for count in range(len(parts), 0, -1):
        yield f"{registry}/{'/'.join(parts[:count])}"
    yield from _HUB_KEYS if registry == DOCKER_HUB else (registry, f"https://{registry}", f"http://{registry}")


def _from_helper(helper: str, key: str) -> Credentials | None:
    """Ask the program docker-credential-HELPER, as docker does, with the whole environment."""
    # The name becomes part of a program's: a slash would run any file.
    if not _HELPER.fullmatch(helper):
        raise ImageError(f"{helper!r:.100} is not the name of a credential helper")
    program = f"docker-credential-{helper}"
    try:
        # All variables: the helpers of clouds read AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS and the like.
        answer = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=_HELPER_S, env=environment()
        )
    except (OSError, subprocess.TimeoutExpired):
        raise ImageError(f"{program}, which has the password for {key}, cannot be run") from None
    if answer.returncode:
        return None  # it knows none
    try:
        values = json.loads(answer.stdout)
        return Credentials(values["Username"], values["Secret"])
    except (ValueError, KeyError, TypeError):
        raise ImageError(f"{program} answered with something else than credentials for {key}") from None
