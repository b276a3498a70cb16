"""Pythons of the environments of other packages, in which tests use the packages themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.peer_environments import Peer, set_up
from benchmarks.report import BenchmarkError

REQUIRED = "FORGE_RL_REQUIRE_PEERS"
"""Variable that, where it is set, has a test fail instead of being skipped if its peer cannot be installed."""


def peer_python(peer: Peer) -> Path:
    """Return the Python of a peer's environment, made once; skips the test if it cannot be made."""
    try:
        return set_up(peer)
    except BenchmarkError as error:
        if os.environ.get(REQUIRED):
            raise
        pytest.skip(f"the environment of {peer.name} cannot be made here: {error}")
