"""An engine that serves versions as adapters, started once for all checks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.engine_served import SERVED
from tests.served_host import RunCheck, ServedHost, hosted

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run_on_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunCheck]:
    with asyncio.Runner() as runner:
        options = {"adapters": "served", "max_loras": 3, "max_lora_rank": 8}
        context = hosted(ServedHost, tmp_path_factory.mktemp("engine"), options)
        yield runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("check", SERVED)
def test_an_engine_of_served_versions(check: str, run_on_engine: RunCheck) -> None:
    failure = run_on_engine(check)
    assert not failure, failure
