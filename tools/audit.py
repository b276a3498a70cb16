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
    pinned_versions = sorted({*pins.pins_of("cpu").items(), *pins.pins_of("cuda").items()})
    base = pins.registry()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        releases = list(pool.map(lambda pin: pins.release(base, *pin), pinned_versions))
    reasons = {(entry["package"], entry["id"]): entry["reason"] for entry in _reviewed()}
    open_advisories, reported = 0, set()
    for (name, version), release in zip(pinned_versions, releases, strict=True):
        for identifier, also, fixed, summary in _advisories(release) if release else ():
            reported.add((name, identifier))
            reason = reasons.get((name, identifier))
            open_advisories += reason is None
            print(f"{name} {version}: {identifier}{also}, fixed in {fixed}")
            print(textwrap.indent(f"{summary}\n{f'reviewed: {reason}' if reason else 'NOT REVIEWED'}", "    "))
    silent = [
        f"{name} {version}"
        for (name, version), release in zip(pinned_versions, releases, strict=True)
        if release is None
    ]
    for name, identifier in sorted(set(reasons) - reported):
        print(f"{name}: {identifier} is reviewed, but the registry did not report it: fixed, or no answer")
    if silent:
        print(f"no answer for {len(silent)} of {len(pinned_versions)}, which may still have advisories:")
        lines = textwrap.wrap(", ".join(silent), 116, break_on_hyphens=False)
        print(textwrap.indent("\n".join(lines), "    "))
    print(
        f"{len(pinned_versions) - len(silent)} pins asked about, {len(reported)} advisories, "
        f"{open_advisories} not reviewed"
    )
    if len(silent) == len(pinned_versions):
        print("the registry answered for none: nothing is known", file=sys.stderr)
        return 2
    return 1 if open_advisories else 0


def _reviewed() -> list[dict[str, str]]:
    entries: list[dict[str, str]] = tomllib.loads((pins.REQUIREMENTS / REVIEWED).read_text()).get("reviewed", [])
    return entries


def _advisories(release: pins.Release) -> Iterator[tuple[str, str, str, str]]:
    """Yield identifier, aliases, fixed versions and summary of each advisory that was not withdrawn."""
    for advisory in release.get("vulnerabilities") or ():
        if not advisory.get("withdrawn"):
            aliases = f" ({', '.join(advisory['aliases'])})" if advisory.get("aliases") else ""
            text = advisory.get("summary") or advisory.get("details") or ""
            fixes = ", ".join(advisory.get("fixed_in") or ()) or "no version"
            yield advisory["id"], aliases, fixes, textwrap.shorten(text, 200)


if __name__ == "__main__":
    sys.exit(main())
