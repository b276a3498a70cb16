"""An engine's workers on a host that does not schedule; they follow the first host's scheduler."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from forge_rl.engines import ENGINE_DIED
from forge_rl.engines.parts import EnginePart
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.engines.vllm.arguments import engine_arguments
from forge_rl.engines.vllm.causes import own_log, start_cause
from forge_rl.engines.vllm.internals import start_following
from forge_rl.errors import ModelError
from forge_rl.runtime.processes import when_process_ends
from forge_rl.runtime.signals import children_outlive_stop_signals


class FollowingPart:
    """An engine's workers on this host, which take orders from the engine's first host.

    The workers end with this process, and this process ends with any of them.

    Args:
        folder: Hugging Face model folder.
        seed: seed for requests without one.
        part: which part this is; not the first.

    Raises:
        ModelError: vLLM does not start.
    """

    def __init__(self, folder: Path, settings: DecodeSettings, seed: int, part: EnginePart) -> None:
        self._closing = False
        try:
            with children_outlive_stop_signals():
                self._executor, self._pids = start_following(engine_arguments(folder, settings, seed, part))
        except (ValueError, RuntimeError) as error:
            raise ModelError(
                f"vLLM does not start with {folder}: {start_cause(error, own_log())}",
                hint="see logs/generator-*.log in the run folder for vLLM's output",
            ) from error
        for pid in self._pids:
            when_process_ends(pid, self._on_worker_death)

    def close(self) -> None:
        self._closing = True
        for pid in self._pids:
            # A worker may have ended already.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on_worker_death(self) -> None:
        if not self._closing:
            print("forge_rl: a worker of the vLLM engine died", file=sys.stderr, flush=True)
            os._exit(ENGINE_DIED)
