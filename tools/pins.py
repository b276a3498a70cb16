"""Reads the pins of requirements/, and queries the package index that pip is configured with."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parent.parent / "requirements"
_PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^\s\\;]+)", re.MULTILINE)
_INDEX = re.compile(r"--index-url <url>.*?\(default\s+(\S+?)\)", re.DOTALL)
_TIMEOUT_S = 60.0

Release = Mapping[str, Any]
"""A release, as described by the index's JSON API."""


def pins(*files: str) -> dict[str, str]:
    """Return the pinned version of each package in files of requirements/.

    pins("constraints-cpu.txt", "overrides-cpu.txt")["torch"]  # "2.13.0+cpu"
    """
    return {name: version for file in files for name, version in _PIN.findall((REQUIREMENTS / file).read_text())}


def pins_of(extra: str) -> dict[str, str]:
    """Return all pins of the environment for "cpu" or "cuda"."""
    return pins("uv.txt", f"constraints-{extra}.txt", f"overrides-{extra}.txt")


@functools.cache
def registry() -> str:
    """Return the URL of the JSON API of the index configured for uv or pip; pip's is shown in its help."""
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
    if not index:
        command = [sys.executable, "-m", "pip", "download", "--help"]
        wide = {**os.environ, "COLUMNS": "1000"}  # so that the URL is not wrapped
        help_text = subprocess.run(command, env=wide, capture_output=True, text=True, check=True).stdout
        match = _INDEX.search(help_text)
        assert match is not None, "pip's help names its index"
        index = match[1]
    return index.rstrip("/").removesuffix("/simple") + "/pypi"


def release(base: str, name: str, version: str) -> Release | None:
    """Query a registry for a release; return None if it has no answer for exactly this one.

    Some registries answer only for the latest release.
    """
    public = version.partition("+")[0]
    answers = (_ask(f"{base}/{path}") for path in (f"{name}/{public}/json", f"{name}/json"))
    return next((answer for answer in answers if answer and answer["info"]["version"] == public), None)


def latest(base: str, name: str) -> Release | None:
    """Query a registry for a package's latest release; return None if it does not answer."""
    return _ask(f"{base}/{name}/json")


def _ask(url: str) -> Release | None:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            release_info: Release = json.load(answer)
            return release_info
    except (OSError, ValueError):  # not found, no network, or not JSON
        return None
