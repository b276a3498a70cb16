"""An engine that serves versions as adapters, started once for all checks."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator

import pytest
from monarch.actor import concurrent_endpoint

from tests.engine_served import SERVED
from tests.test_engine_conformance import RunCheck, VLLMHost, hosted

pytestmark = pytest.mark.long


class ServedHost(VLLMHost):
    """A process with one engine, in which the checks of served versions run."""

    @concurrent_endpoint
    async def run(self, check: str) -> str:
        assert self._decoder is not None
        try:
            await asyncio.wait_for(SERVED[check](self._decoder), 300)
        except Exception:
            return traceback.format_exc()
        return ""


@pytest.fixture(scope="module")
def run_on_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunCheck]:
    with asyncio.Runner() as runner:
        given = {"adapters": "served", "max_loras": 3, "max_lora_rank": 8}
        context = hosted(ServedHost, tmp_path_factory.mktemp("engine"), given)
        yield runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("check", SERVED)
def test_an_engine_of_served_versions(check: str, run_on_engine: RunCheck) -> None:
    failure = run_on_engine(check)
    assert not failure, failure
