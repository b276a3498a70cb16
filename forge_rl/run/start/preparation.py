"""The first stage of a start: the run's folder, its log and its display."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from forge_rl.engines.platform import slow_format
from forge_rl.errors import ConfigError
from forge_rl.metrics import Display, EpisodeSink, EventSink, JSONLSink, PhaseClock, RunInfo, RunLog, Sink
from forge_rl.metrics.alerts import AlertSink
from forge_rl.metrics.boards import TensorBoardSink, WandbSink
from forge_rl.metrics.prometheus import PrometheusSink
from forge_rl.metrics.recorder import EpisodeRecorder
from forge_rl.metrics.sinks import RunOutcome
from forge_rl.rewards.confinement import missing_confinement
from forge_rl.run.checkpoints.files import Checkpoint, Checkpoints
from forge_rl.run.checkpoints.mirror import SETTINGS, CheckpointMirror
from forge_rl.run.endpoints import address_of, is_loopback, listen
from forge_rl.run.plan.defaults import colocated
from forge_rl.run.records.monitor import RunEnd, RunMonitor
from forge_rl.run.records.run_dir import as_flat_json, check_same, choose_folder, is_finished, prepare_folder
from forge_rl.run.records.started_from import MODELS
from forge_rl.run.run_config import RunConfig
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.hold import Hold
from forge_rl.runtime.isolation import check_isolation
from forge_rl.runtime.pauses import clock_without_pauses
from forge_rl.runtime.processes import responsive_loop
from forge_rl.system.folders import is_there, reading, write_whole

_SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """The locked folder of a run, its checkpoints, and its monitor."""

    folder: Path
    checkpoints: Checkpoints
    checkpoint: Checkpoint | None
    """Checkpoint to resume from, if any."""
    monitor: RunMonitor
    mirror: CheckpointMirror | None = None
    """Where checkpoints are copied to."""
    earlier: Mapping[str, bytes] = field(default_factory=dict)
    """Files that say what the run is, as an earlier command left them; none in a new run."""

    def fail(self, outcome: RunOutcome, cause: str = "") -> None:
        """End a start that failed or was stopped, and restore an earlier run's files; a finished run stays finished."""
        _put_back(self.folder, self.earlier)
        if _SUMMARY in self.earlier:
            self.monitor.log.end(outcome, cause)
            return
        step = self.checkpoint.step if self.checkpoint is not None else 0
        self.monitor.summarise(RunEnd(outcome=outcome, cause=cause, step=step, seconds=0.0), show=False)


@contextlib.asynccontextmanager
async def prepare(config: RunConfig, recipe: str, code: Mapping[str, str]) -> AsyncIterator[PreparedRun]:
    """Create the run folder, or find the one to resume, and log to it while the body runs.

    Args:
        recipe: name of the recipe.
        code: digests of the user's files, see `code_digests`.

    Raises:
        ConfigError: settings contradict each other, the machine, or the run being resumed.
        CheckpointError: the folder is not writable, or another process runs there.
    """
    isolation_warning = check_isolation(config.isolation)
    if config.job == "local":
        colocated(config)  # refuses too few GPUs, before there is a folder
    folder, notes = choose_folder(config, recipe, config.out, code)
    earlier = _earlier_records(folder)
    with contextlib.ExitStack() as stack:
        # The lock is taken before checkpoints are read or repaired, and held until everything else is closed.
        stack.callback(os.close, prepare_folder(folder, config, code))
        ready: list[PreparedRun] = []

        def undo() -> None:
            if not ready:
                _put_back(folder, earlier)

        stack.callback(undo)
        # One pause for clock, deadlines and display, so that none of them counts its time.
        hold = Hold()
        clock = PhaseClock(paused_s=lambda: hold.seconds)
        display = Display(config.display, phase_clock=clock)
        # There is no log yet to take these warnings.
        checkpoint_warnings: list[str] = []
        mirror = CheckpointMirror(config.checkpoint_mirror) if config.checkpoint_mirror else None
        checkpoints = Checkpoints(
            folder / "checkpoints", keep=config.keep_checkpoints, keeps_best=config.evaluation.keep_best
        )
        checkpoint = await asyncio.to_thread(checkpoints.set_damaged_aside, checkpoint_warnings.append)
        # After damaged checkpoints were set aside, so that their copies take their places.
        if mirror is not None:
            compare = partial(check_same, config=config, code=code, flag="--checkpoint-mirror")
            restore = partial(
                mirror.restore,
                folder,
                check_settings=compare,
                tell=checkpoint_warnings.append,
                progress=display.progress,
            )
            await asyncio.to_thread(restore)
            checkpoint = checkpoints.latest()
        if checkpoint is None:
            checkpoints.check_new()
        faults = Faults(phase=lambda: clock.current, hold=hold)
        sinks = _sinks(config, folder, notes)
        if config.prometheus:
            sinks.append(
                PrometheusSink(listen(config.prometheus), phase=lambda: clock.current, paused=lambda: hold.paused)
            )
        log = RunLog(display, *sinks, max_lag=config.schedule.lag)
        stack.callback(log.close)
        monitor = stack.enter_context(contextlib.closing(RunMonitor(folder, display, log, clock, faults)))
        stack.enter_context(responsive_loop())
        stack.enter_context(clock_without_pauses())
        log.start(
            RunInfo(
                recipe=recipe,
                model=config.model,
                folder=folder,
                steps=config.steps,
                step=checkpoint.step if checkpoint else 0,
                config=as_flat_json(config),
            )
        )
        # What was found before there was a log.
        for note in notes:
            log.event(note)
        metrics_warning = _serving_metrics(config)
        for warning in (
            *checkpoint_warnings,
            isolation_warning,
            metrics_warning,
            missing_confinement(),
            slow_format(config.trainer.dtype),
        ):
            if warning:
                log.warn(warning)
        faults.install()
        ready.append(
            PreparedRun(
                folder=folder,
                checkpoints=checkpoints,
                checkpoint=checkpoint,
                monitor=monitor,
                mirror=mirror,
                earlier=earlier,
            )
        )
        yield ready[0]


def _earlier_records(folder: Path) -> dict[str, bytes]:
    """Return the bytes of a run's files that its next start overwrites, by name; of a finished run, the summary too."""
    with reading(folder):
        names = [*SETTINGS, MODELS, *([_SUMMARY] if is_finished(folder) else [])]
        return {name: (folder / name).read_bytes() for name in names if is_there(folder / name)}


def _put_back(folder: Path, records: Mapping[str, bytes]) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next command then says what differs
        for name, content in records.items():
            write_whole(folder / name, content)


def _sinks(config: RunConfig, folder: Path, notes: list[str]) -> list[Sink]:
    """Create the sinks; adds to `notes` if TensorBoard is not installed."""
    sinks: list[Sink] = [
        JSONLSink(folder / "metrics.jsonl"),
        EventSink(folder / "events.jsonl"),
        EpisodeSink(folder / "episodes.jsonl"),
    ]
    if config.recording.share:
        sinks.append(EpisodeRecorder(folder, config.recording))
    try:
        sinks.append(TensorBoardSink(folder / "tensorboard"))
    except ConfigError as error:
        notes.append(f"no TensorBoard curves: {error.message}; {error.hint}")
    if config.wandb:
        sinks.append(WandbSink(config.wandb))
    if config.alerts.command or config.alerts.webhook_url:
        sinks.append(AlertSink(config.alerts))
    return sinks


def _serving_metrics(config: RunConfig) -> str:
    """Return a warning if other machines can read the metrics, or ""."""
    host = address_of(config.prometheus)[0] if config.prometheus else ""
    if not host or is_loopback(host):
        return ""
    return f"--prometheus serves metrics on {host}, without a key, to everybody who reaches it"
