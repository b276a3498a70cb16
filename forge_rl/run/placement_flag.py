"""Parses the flag --placement: whether trainer and engines share devices, and which service has which hosts."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from forge_rl.errors import ConfigError
from forge_rl.flags.texts import suggest
from forge_rl.rollout.placement import Placement

SERVICES = ("trainer", "generator", "teachers", "reward", "environment")
"""Services whose hosts can be chosen. A critic is on the trainer's hosts; the weight store on all that need weights."""
_MODE = "devices"
"""Key of a file that says whether trainer and engines share devices."""
_FORM = "write colocated, separate, trainer=HOST+HOST;environment=HOST, or the path of a TOML file with these keys"


@dataclass(frozen=True, kw_only=True)
class PlacementChoice:
    """The parts of a placement that a user chose; the others have their defaults."""

    devices: Placement = "auto"
    """Whether trainer and engines share devices."""
    hosts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the hosts of a service."""

    @property
    def text(self) -> str:
        """The text that `read_placement` turns into this choice."""
        return ";".join([self.devices, *(f"{service}={'+'.join(names)}" for service, names in self.hosts.items())])


def read_placement(text: str) -> PlacementChoice:
    """Read the flag's text, or the file that it names.

        read_placement("colocated")
        read_placement("separate;trainer=host0+host1;generator=host2;environment=host3")
        read_placement("placement.toml")  # trainer = ["host0", "host1"]

    Raises:
        ConfigError: it has neither form, names no such service, or one without hosts.
    """
    pairs = _of_file(Path(text)) if text.endswith(".toml") else _of_text(text)
    devices: Placement = "auto"
    hosts: dict[str, tuple[str, ...]] = {}
    for key, values in pairs:
        # A bare word of the text and the key `devices` of a file arrive here alike.
        if key == _MODE and len(values) == 1 and values[0] in get_args(Placement):
            devices = cast(Placement, values[0])
            continue
        if key == _MODE:
            raise ConfigError(f"--placement: {'+'.join(values)!r} is not a placement of devices", hint=_FORM)
        if key not in SERVICES:
            raise ConfigError(f"--placement: {key!r} is not a service", hint=suggest(key, SERVICES, "services"))
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"--placement: {key} has the hosts {'+'.join(values)!r}", hint="name each host once")
        hosts[key] = values
    return PlacementChoice(devices=devices, hosts=hosts)


def _of_text(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for part in filter(None, (segment.strip() for segment in text.split(";"))):
        key, equals, names = part.partition("=")
        if equals:
            yield key.strip(), tuple(name for name in (host.strip() for host in names.split("+")) if name)
        else:
            yield _MODE, (part,)


def _of_file(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--placement {path}: {error.strerror or error}", hint="name an existing file") from None
    # A deeply nested file raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--placement {path} is not TOML: {error}", hint=_FORM) from None
    for key, value in table.items():
        values: Sequence[object] = value if isinstance(value, list) else [value]
        if not all(isinstance(host, str) for host in values):
            raise ConfigError(f"--placement {path}: {key} is {value!r:.80}", hint="give names of hosts")
        yield key, tuple(map(str, values))
