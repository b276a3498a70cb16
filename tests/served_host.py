"""Processes with an engine that serves versions as adapters."""

from __future__ import annotations

import asyncio
import json
import traceback

from monarch.actor import concurrent_endpoint

from tests.engine_adapters import errors_of_mistakes
from tests.engine_served import SERVED, errors_of_served_mistakes, errors_of_weight_mistakes
from tests.test_engine_conformance import RunCheck, VLLMHost, hosted

__all__ = ["MistakeHost", "RunCheck", "ServedHost", "hosted"]


class ServedHost(VLLMHost):
    """A process with one engine, in which the checks of served versions run."""

    @concurrent_endpoint
    async def run(self, check: str) -> str:
        assert self._decoder is not None
        try:
            await asyncio.wait_for(SERVED[check](self._decoder), 300)
        except Exception:
            await self._decoder.engine.hold(paused=False, asleep=False)  # the next check finds it as this one did
            return traceback.format_exc()
        return ""


class MistakeHost(VLLMHost):
    """A process with one engine, in which mistakes are made: the errors, as JSON."""

    @concurrent_endpoint
    async def run(self, check: str) -> str:
        assert self._decoder is not None
        if check == "value":
            return json.dumps(await errors_of_mistakes(self._decoder))
        if check == "weights":
            return json.dumps(await errors_of_weight_mistakes(self._decoder))
        self._decoder.engine._adapters.serve_versions = True  # type: ignore[attr-defined]
        return json.dumps(await errors_of_served_mistakes(self._decoder))
