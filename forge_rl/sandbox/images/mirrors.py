"""Mirrors of registries, from the file that podman, buildah and skopeo read: containers-registries.conf(5)."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.system.variables import value_of

_SYSTEM = "/etc/containers/registries.conf"


def mirrors_file() -> Path | None:
    """Return the file with the mirrors of this user, or else of this machine; None if there is none.

    Raises:
        ConfigError: CONTAINERS_REGISTRIES_CONF does not name a file.
    """
    if (named := value_of("CONTAINERS_REGISTRIES_CONF")) and not Path(named).expanduser().is_file():
        raise ConfigError(
            f"CONTAINERS_REGISTRIES_CONF is {named!r:.200}, which is not a file", hint="correct it, or unset it"
        )
    config = value_of("XDG_CONFIG_HOME") or "~/.config"
    places = [named, f"{config}/containers/registries.conf", _SYSTEM]
    paths = (Path(place).expanduser() for place in places if place)
    return next((path for path in paths if path.is_file()), None)


def mirrors_of(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the addresses to ask before a registry, by its host.

    Entries for parts of a registry, and mirrors below a path, have no equivalent here: they are left out with a
    warning.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        registries = tomllib.loads(path.read_text()).get("registry", [])
        mirrors = dict[str, tuple[str, ...]]()
        for registry in registries:
            location = registry.get("location", "")
            host = registry.get("prefix") or location
            addresses = tuple(_addresses(registry.get("mirror", []), path))
            if registry.get("blocked") or "/" in host or "*" in host or location not in ("", host):
                warnings.warn(f"{path}: what it says of {host!r:.100} is not used", stacklevel=2)
            elif addresses:
                mirrors[host] = addresses
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read as registries: {error!r:.200}", hint="see registries.conf(5)"
        ) from None
    return mirrors


def _addresses(mirrors: list[dict[str, object]], path: Path) -> Iterator[str]:
    for mirror in mirrors:
        location = str(mirror["location"]) if "location" in mirror else ""
        if not location or "/" in location:
            warnings.warn(f"{path}: the mirror {location!r:.100} is not used", stacklevel=3)
        else:
            yield f"{'http' if mirror.get('insecure') is True else 'https'}://{location}"
