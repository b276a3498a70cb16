"""Sinks that draw curves: TensorBoard and W&B, each imported on first use."""

from __future__ import annotations

import contextlib
import html
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.errors import ConfigError, check_installed
from forge_rl.metrics.sinks import Level, Metric, RunInfo, Sink, episode_sample
from forge_rl.metrics.step_lines import writing
from forge_rl.metrics.values import Histogram
from forge_rl.system.folders import write_whole
from forge_rl.system.terminal import visible
from forge_rl.types import Batch

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter


_SAMPLED_STEPS = 50
"""About how many steps of a run have samples of episodes."""
_SAMPLED_EPISODES = 8
_MOST_LETTERS = 4000
"""Most letters of each text of a sample."""
_COLUMNS = ("task", "source", "prompt", "conversation", "answer", "reward", "outcome", "turns", "tokens")
_COMPARED = ("reward/mean", "held_out", "loss", "entropy", "tokens/completion_mean")
"""Metrics by which TensorBoard compares the settings of runs."""


class TensorBoardSink(Sink):
    """Draws a curve for each metric, and shows settings, events and samples of episodes; a resumed run hides entries
    after the step it resumed from.

    Raises:
        CheckpointError: the disk is full, or the folder is not writable.
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        check_installed("drawing curves", "tensorboard", "tensorboard")
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._step = 0
        self._steps = 1

    def start(self, info: RunInfo) -> None:
        super().start(info)
        self._steps = info.steps
        if info.step == 0:
            self._show_settings(info)

    def _show_settings(self, info: RunInfo) -> None:
        """Write the settings for the page that compares runs by them."""
        from torch.utils.tensorboard.summary import hparams

        settings = {
            # `hparams` refuses values of other types.
            name: value if isinstance(value, bool | int | float) else str(value)[:_MOST_LETTERS]
            for name, value in info.config.items()
        }
        with self._writing() as writer:
            # The zeros only name the metrics to compare; their values are those of the curves.
            for summary in hparams(settings, dict.fromkeys(_COMPARED, 0.0)):
                writer.file_writer.add_summary(summary)

    def rollback(self, step: int) -> None:
        self.close()
        self._step = step
        with self._writing():
            pass  # open now to fail early

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        with self._writing() as writer:
            self._step = max(self._step, step)
            for name, value in values.items():
                if not isinstance(value, Histogram):
                    writer.add_scalar(name, value, step)
                elif value.counts:
                    counts, edges = value.bins()
                    writer.add_histogram_raw(
                        name,
                        min=min(value.counts),
                        max=max(value.counts),
                        num=value.total,
                        sum=sum(number * count for number, count in value.counts.items()),
                        sum_squares=sum(number**2 * count for number, count in value.counts.items()),
                        # Each bucket begins where the previous one ends; an empty one sets the first lower edge.
                        bucket_limits=edges,
                        bucket_counts=[0, *counts],
                        global_step=step,
                    )
            for place, row in enumerate(_samples(step, self._steps, batch)):
                writer.add_text(f"episodes/{place}", _verbatim(row), step)

    def event(self, text: str, level: Level) -> None:
        with self._writing() as writer:
            writer.add_text(f"events/{level}", visible(text), self._step)

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with writing(self._folder):
                writer.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[SummaryWriter]:
        """Yield the writer. After an error such as a full disk it is unusable, so the next call opens another."""
        from torch.utils.tensorboard import SummaryWriter

        with writing(self._folder):
            if self._writer is None:
                _wait_for_a_later_name(self._folder)
                # By purge_step, TensorBoard hides what an earlier process wrote after this step.
                self._writer = SummaryWriter(str(self._folder), purge_step=self._step + 1, flush_secs=10)
            try:
                yield self._writer
            except OSError:
                self._writer = None
                raise


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait, for less than a second, until a new event file sorts after those in `folder`.

    TensorBoard reads files in the order of their names, which hold the second, the host, the process and a count:
    within a second, the tenth file comes before the ninth, and steps that a resumed run purges would come back.
    """
    seconds = [
        int(path.name.split(".")[3])
        for path in folder.glob("events.out.tfevents.*.*")
        if path.name.split(".")[3].isdigit()
    ]
    wait_s = max(seconds, default=0) + 1 - time.time()
    if 0 < wait_s <= 1:
        time.sleep(wait_s)


class WandbSink(Sink):
    """Logs to Weights & Biases, with the settings, and at about 50 steps a table of episodes and one of them as a page;
    a resumed run continues the same W&B run.

    The W&B run is named after the run folder. W&B cannot rewind, so steps repeated after a resume keep their first
    values, and late evaluation results are drawn at the current step together with their own `eval/step`. Events are
    not sent, as W&B captures the console output itself.

    Raises:
        ConfigError: wandb is not installed or, at the start, refuses the run.
    """

    def __init__(self, project: str) -> None:
        # Imported here rather than in `start`, to report a missing package before any service starts.
        check_installed(f"the W&B project {project!r}", "wandb", "wandb")
        import wandb

        self._wandb = wandb
        self._project = project
        self._run: wandb.Run | None = None
        self._step = 0
        self._steps = 1

    def start(self, info: RunInfo) -> None:
        self._steps = info.steps
        try:
            self._run = self._wandb.init(
                project=self._project,
                name=info.folder.name,
                config=dict(info.config),
                dir=str(info.folder),
                id=_run_id(info),
                resume="allow",
            )
        except self._wandb.Error as error:
            raise ConfigError(
                f"--wandb {self._project}: W&B refuses: {error}", hint="log in with `wandb login`, or leave out --wandb"
            ) from error

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        assert self._run is not None, "the sink was not started"
        drawn = {
            name: self._wandb.Histogram(np_histogram=value.bins()) if isinstance(value, Histogram) else value
            for name, value in values.items()
            if not isinstance(value, Histogram) or value.counts
        }
        if samples := _samples(step, self._steps, batch):
            rows = [[row.get(name) for name in _COLUMNS] for row in samples]
            drawn["episodes/table"] = self._wandb.Table(columns=list(_COLUMNS), data=rows)
            # Escaped, as a model may write HTML.
            page = f"<pre style='white-space: pre-wrap'>{html.escape(_text(samples[0]))}</pre>"
            drawn["episodes/first"] = self._wandb.Html(page, inject=False, data_is_not_path=True)
        if step < self._step:
            drawn["eval/step"] = step
        self._step = max(self._step, step)
        self._run.log(drawn, step=self._step)

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


def _samples(step: int, steps: int, batch: Batch | None) -> list[dict[str, object]]:
    """Describe a few episodes of a batch, spread evenly over it; [] for most steps of a long run."""
    if batch is None or (step - 1) % max(1, steps // _SAMPLED_STEPS):
        return []
    episodes = batch.episodes
    num_samples = min(_SAMPLED_EPISODES, len(episodes))
    rows = (episode_sample(episodes[place * len(episodes) // num_samples]) for place in range(num_samples))
    return [
        {name: visible(value[:_MOST_LETTERS]) if isinstance(value, str) else value for name, value in row.items()}
        for row in rows
    ]


def _text(row: Mapping[str, object]) -> str:
    """Write a sample as text."""
    heading = ", ".join(f"{name} {row[name]}" for name in ("source", "task", "reward", "outcome", "turns", "tokens"))
    conversation = row.get("conversation") or f"{row['prompt']}\n\nassistant: {row['answer']}"
    return f"{heading}\n\n{conversation}"


def _verbatim(row: Mapping[str, object]) -> str:
    """Write a sample as Markdown that shows its text verbatim."""
    return "\n".join(f"    {line}" for line in _text(row).splitlines())


def _run_id(info: RunInfo) -> str:
    """Return the id of this folder's W&B run: new for a fresh run, unchanged for a resumed one."""
    path = info.folder / "wandb_run_id"
    with writing(path):
        run_id = path.read_text(errors="replace").strip() if info.step and path.is_file() else ""
        if not re.fullmatch(r"[0-9a-f]{8}", run_id):  # W&B creates a folder with this name
            write_whole(path, run_id := secrets.token_hex(4))
        return run_id
