"""Lists the registry's security advisories for all packages pinned in requirements/.

    python -m tools.audit

Exits with 1 if there is an advisory without a reason in requirements/advisories.toml, and with 2 if the registry
answered for no package at all.
"""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tools import pins

REVIEWED = "advisories.toml"
CONNECTIONS = 8


def main() -> int:
    """Query the registry, print the advisories, and return the exit status."""
    wanted = sorted({*pins.pins_of("cpu").items(), *pins.pins_of("cuda").items()})
    base = pins.registry()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        told = list(pool.map(lambda pin: pins.release(base, *pin), wanted))
    reasons = {(entry["package"], entry["id"]): entry["reason"] for entry in _reviewed()}
    open_advisories, seen = 0, set()
    for (name, version), release in zip(wanted, told, strict=True):
        for identifier, also, fixed, summary in _advisories(release) if release else ():
            seen.add((name, identifier))
            reason = reasons.get((name, identifier))
            open_advisories += reason is None
            print(f"{name} {version}: {identifier}{also}, fixed in {fixed}")
            print(textwrap.indent(f"{summary}\n{f'reviewed: {reason}' if reason else 'NOT REVIEWED'}", "    "))
    silent = [f"{name} {version}" for (name, version), release in zip(wanted, told, strict=True) if release is None]
    for name, identifier in sorted(set(reasons) - seen):
        print(f"{name}: {identifier} is reviewed, but the registry did not report it: fixed, or no answer")
    if silent:
        print(f"no answer for {len(silent)} of {len(wanted)}, which may still have advisories:")
        lines = textwrap.wrap(", ".join(silent), 116, break_on_hyphens=False)
        print(textwrap.indent("\n".join(lines), "    "))
    print(f"{len(wanted) - len(silent)} pins asked about, {len(seen)} advisories, {open_advisories} not reviewed")
    if len(silent) == len(wanted):
        print("the registry answered for none: nothing is known", file=sys.stderr)
        return 2
    return 1 if open_advisories else 0


def _reviewed() -> list[dict[str, str]]:
    found: list[dict[str, str]] = tomllib.loads((pins.REQUIREMENTS / REVIEWED).read_text()).get("reviewed", [])
    return found


def _advisories(release: pins.Release) -> Iterator[tuple[str, str, str, str]]:
    """Yield identifier, aliases, fixed versions and summary of each advisory that was not withdrawn."""
    for told in release.get("vulnerabilities") or ():
        if not told.get("withdrawn"):
            also = f" ({', '.join(told['aliases'])})" if told.get("aliases") else ""
            text = told.get("summary") or told.get("details") or ""
            yield told["id"], also, ", ".join(told.get("fixed_in") or ()) or "no version", textwrap.shorten(text, 200)


if __name__ == "__main__":
    sys.exit(main())
