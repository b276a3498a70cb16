"""A peer that is missing is told: its tests are skipped, or fail where they must not be."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peer_environments import TINKER
from benchmarks.report import BenchmarkError
from tests.peer_pythons import REQUIRED, peer_python


def test_tests_of_a_peer_that_cannot_be_installed_are_skipped_or_fail_if_it_is_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.peer_environments.ROOT", tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="the environment of tinker cannot be made here"):
        peer_python(TINKER)
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(BenchmarkError, match="tinker cannot be installed"):
        peer_python(TINKER)
