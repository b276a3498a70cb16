"""Adapters of a run: several trainings over one base, each with its own data, optimizer, versions and metrics."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.adapter_settings import AdamStep, AdapterPass, AdapterSettings
from forge_rl.engines.lora_config import check_shared_base
from forge_rl.errors import CheckpointError, ConfigError, ForgeError, ServiceError
from forge_rl.packing.rows import PackedBatch
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.run_config import RunConfig
from forge_rl.services.generator import Generator
from forge_rl.services.trainer import Trainer
from forge_rl.services.trainer_adapters import Pass
from forge_rl.system.seeds import derive_seed

C = TypeVar("C", bound=RunConfig)

FOLDER = "adapters"
"""Folder of a checkpoint with a folder for each adapter, in PEFT's format, with its moments."""
_ABSENT = {
    "reference": "a frozen reference",
    "proximal": "logprobs from before the batch's first update",
    "values": "values",
}
"""What a pass of one of several adapters does not compute for a loss."""


def with_adapters(config: C, loss: Loss, names: Sequence[str]) -> C:
    """Return a run's settings with room in its engines for adapters with these names.

        config = with_adapters(config, loss, ["math", "code"])

    Raises:
        ConfigError: the settings or the loss allow no adapters by name.
    """
    _check_names(names)
    if not config.lora.rank:
        raise ConfigError("--lora.rank is 0, and the recipe trains adapters", hint="set it to their rank, such as 16")
    check_shared_base(config.lora)
    # Engines hold an adapter by name in one version at a time, so no episode may outlive a publish.
    if config.schedule.lag:
        raise ConfigError(
            f"--schedule.kind {config.schedule.kind} has episodes of several versions, which adapters by name lack",
            hint="set --schedule.kind synchronous",
        )
    # Unlike `Trainer.step`, a pass of an adapter takes no temperature.
    if config.generator.temperature != 1:
        raise ConfigError(
            f"--generator.temperature is {config.generator.temperature:g}, and adapters by name are trained at 1",
            hint="leave it out",
        )
    if absent := sorted(_ABSENT.keys() & loss.needs):
        raise ConfigError(
            f"the loss needs {_ABSENT[absent[0]]}, which training adapters by name does not compute",
            hint="choose --loss clipped without kl_coef, or train one adapter with recipes.grpo --lora.rank",
        )
    # Engines reserve slots for adapters when they start: room for all of them has to be known by then.
    generator = replace(
        config.generator,
        max_loras=max(config.generator.max_loras, len(set(names))),
        max_lora_rank=max(config.generator.max_lora_rank, config.lora.rank),
    )
    return replace(config, generator=generator)


def _check_names(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that cannot name a folder."""
    for name in names:
        if not re.fullmatch(r"\w[\w.-]{0,63}", name):
            raise ConfigError(
                f"{name!r:.80} cannot name an adapter",
                hint="use at most 64 letters, digits, dots and dashes, as in --tasks math=org/data",
            )


@dataclass(eq=False, kw_only=True)
class RunAdapter:
    """One adapter of a run.

    math = run.adapter("math")
    math.version, math.updates, math.failure
    """

    name: str
    """Name in samples and metrics, and name of the source whose episodes are sampled with it."""
    updates: int = 0
    """Number of optimizer steps that it has taken."""
    version: int = -1
    """Number of updates of the values that engines sample with; -1 before the first publish."""
    skipped: int = 0
    """Number of consecutive updates that were skipped because they failed or were not finite."""
    failure: str = ""
    """Why its training has ended; "" before."""


class RunAdapters:
    """The adapters of a run, opened by name; see `Run.adapter`.

        await run.adapters.open("math", "code")
        stats = await run.adapters.step({"math": packed, "code": other}, run.loss)
        await run.adapters.publish()

    Engines generate the episodes of a source with the adapter of the same name. After a death, trainer and engines get
    back the values that belong to the run's step.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        generator: Generator,
        rollouts: RolloutExecutor,
        *,
        folder: Path,
        checkpoint: Callable[[], Path | None],
        warn: Callable[[str], None],
    ) -> None:
        self._config = config
        self._folder = folder
        self._trainer = trainer
        self._generator = generator
        self._rollouts = rollouts
        self._checkpoint = checkpoint
        self._warn = warn
        self._adapters: dict[str, RunAdapter] = {}
        self._held: set[str] = set()
        """Adapters that the trainer's ranks have."""
        # A larger number later means that the ranks were restarted, without adapters.
        self._loads = trainer.loads
        self.stepping = False
        """True from the first update of a step to the last, and after a step that was interrupted between them."""
        self._holds_gradients = False
        """Whether the trainer may hold gradients, as after a step that was interrupted."""
        # Whether rows of several adapters are computed together; cleared once the model turns out not to allow it.
        self._mixes = config.trainer.ranks == 1

    def __getitem__(self, name: str) -> RunAdapter:
        if name not in self._adapters:
            raise ConfigError(
                f"the run has no adapter {name!r:.80}; it has {', '.join(self._adapters) or 'none'}",
                hint="open it before the first step: await run.adapters.open(...)",
            )
        return self._adapters[name]

    @property
    def updates(self) -> int:
        """Number of updates of all adapters together."""
        return sum(adapter.updates for adapter in self._adapters.values())

    async def open(self, *names: str) -> None:
        """Open adapters, with first values from the run's seed or, in a resumed run, as its checkpoint has them.

        Raises:
            ConfigError: the run's settings allow no adapters, or not so many.
            CheckpointError: the checkpoint lacks one that had been trained.
        """
        _check_names(names)
        loras = self._config.generator.max_loras
        if not self._config.lora.rank or loras < len({*self._adapters, *names}):
            raise ConfigError(
                f"{len({*self._adapters, *names})} adapters need --lora.rank and as many --generator.max-loras",
                hint="let `with_adapters(config, loss, names)` set both",
            )
        for name in names:
            # In a resumed run `load_state_dict` has made it, with the counts of the checkpoint.
            self._adapters.setdefault(name, RunAdapter(name=name))
        await self._load([name for name in self._adapters if name not in self._held])

    async def restore(self) -> None:
        """Bring trainer and engines to the state of the run's last checkpoint, or to the first one without any."""
        # Restarted ranks have no adapters; living ones still hold values of later steps.
        if self._loads != self._trainer.loads:
            self._loads = self._trainer.loads
            self._held.clear()
        for name in sorted(self._held):
            await self._trainer.adapters.drop(name)
            self._held.discard(name)
        await self._load(list(self._adapters))
        self.stepping = self._holds_gradients = False

    async def _load(self, names: Sequence[str]) -> None:
        """Open adapters that the trainer lacks, load what the last checkpoint has of them, and publish them."""
        folder, trained = self._checkpoint(), self._trainer.adapters
        for name in names:
            adapter = self._adapters[name]
            seed = derive_seed(self._config.seed, "adapter", name)
            await trained.open(name, AdapterSettings(lora=self._config.lora, seed=seed))
            self._held.add(name)
            updates, saved = 0, None if folder is None else folder / FOLDER / name
            if saved is not None and saved.is_dir():
                updates = await trained.load(name, saved, optimizer=True)
            # Counts come from the controller's state, values from the adapter's folder: together they must be of one
            # step.
            if updates != adapter.updates:
                raise CheckpointError(
                    f"{folder} holds {updates} updates of adapter {name!r:.80}, but a state of {adapter.updates}",
                    hint=f"delete {folder} to resume from the previous checkpoint",
                )
            # Engines may hold values of a step that was rolled back under the same number, so all are published again.
            adapter.version = -1
        await self.publish()
        self._rollouts.adapters = {name: name for name in self._adapters}
        self._leave_out_failed()

    def _leave_out_failed(self) -> None:
        """Generate no episodes for sources whose adapter has failed, so that batches hold trained ones only."""
        self._rollouts.leave_out([name for name, adapter in self._adapters.items() if adapter.failure])

    async def step(
        self, batches: Mapping[str, PackedBatch], loss: Loss | Mapping[str, Loss], *, mix_rows: bool = True
    ) -> dict[str, float]:
        """Train each adapter on its batch, packed with the trainer's layout; names of metrics begin with the adapter's.

        Each minibatch takes one update per epoch, or none if it has no rows. If one adapter's update fails or is not
        finite, only that update is skipped. After --trainer.max-skipped-updates in a row, training of the
        adapter ends, and no more episodes are generated for its source.

        Args:
            mix_rows: compute rows of several adapters together, if the trainer has one rank and the model supports it.
                Results then equal separate trainings within rounding; without it, bit for bit.

        Raises:
            ForgeError: no adapter is left to train.
        """
        if self._holds_gradients:
            await self._settle()
        self._holds_gradients = True
        updates: dict[str, list[dict[str, float]]] = {name: [] for name in batches}
        passes_of = []
        for name, packed in batches.items():
            adapter_loss = loss[name] if isinstance(loss, Mapping) else loss
            trained = packed if adapter_loss.keeps_uniform else packed.without_uniform
            # `pack` lays out each epoch anew if there are several minibatches; a single one is repeated here.
            epochs = max(1, self._trainer.config.epochs // packed.epochs)
            passes_of.append(
                [AdapterPass(name=name, minibatch=minibatch, loss=adapter_loss) for minibatch in trained.minibatches]
                * epochs
            )
        # The adapters' minibatches go side by side: one pass of each, then one optimizer step of each, so that their
        # rows can share a pass.
        for turn in zip_longest(*passes_of):
            passes = [part for part in turn if part and part.minibatch.rows and not self[part.name].failure]
            results = await self._run(passes, mix_rows)
            self.stepping = True
            for adapter_pass, result in zip(passes, results, strict=True):
                adapter = self[adapter_pass.name]
                metrics = result if isinstance(result, ForgeError) else await self._update(adapter, result)
                if isinstance(metrics, ForgeError):
                    self._skip(adapter, metrics)
                else:
                    adapter.skipped = 0
                    updates[adapter.name].append(metrics)
        self.stepping = self._holds_gradients = False
        failures = [self[name].failure for name in batches]
        if failures and all(failures):
            raise ForgeError(
                f"no adapter is left to train: {failures[0]}",
                hint="lower --trainer.optimizer.lr, or raise --trainer.max-skipped-updates",
            )
        self._leave_out_failed()
        return self._metrics(updates)

    async def _settle(self) -> None:
        """Drop the gradients that an interrupted step has left in the trainer, and adopt the updates that it took."""
        for adapter in self._adapters.values():
            # Loading an adapter drops its gradients; its files are exact.
            with self._scratch() as folder:
                await self._trainer.adapters.save(adapter.name, folder)
                adapter.updates = await self._trainer.adapters.load(adapter.name, folder, optimizer=True)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Yield an empty folder for the files of an adapter, and remove it after the body."""
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=f"{FOLDER}-") as folder:
            yield Path(folder)

    async def _run(self, passes: Sequence[AdapterPass], mix_rows: bool) -> list[Pass | ForgeError]:
        """Run one pass of each adapter, over shared rows if the trainer can; returns results or errors in order."""
        if mix_rows and self._mixes and len(passes) > 1:
            try:
                return await self._trainer.adapters.run_many(passes)
            except ConfigError:  # the model cannot, for example as it has experts
                self._mixes = False
        results: list[Pass | ForgeError] = []
        for adapter_pass in passes:
            name, minibatch, loss = adapter_pass.name, adapter_pass.minibatch, adapter_pass.loss
            try:
                results.append(await self._trainer.adapters.run(name, minibatch, loss))
            except ServiceError:  # dead ranks concern all adapters: the run recovers
                raise
            except ForgeError as error:
                results.append(error)
        return results

    async def _update(self, adapter: RunAdapter, result: Pass) -> dict[str, float] | ForgeError:
        """Take an adapter's optimizer step; returns its metrics, or why there was none."""
        optimizer = self._trainer.config.optimizer
        total = self._config.steps * self._trainer.config.updates_per_batch
        # Each adapter follows the learning rate's schedule by its own count of updates, whatever the others have taken.
        adam = AdamStep(
            lr=optimizer.lr_at(adapter.updates, total),
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
        )
        try:
            metrics, adapter.updates = await self._trainer.adapters.step(adapter.name, adam)
        except ServiceError:
            raise
        except ForgeError as error:
            return error
        return result.metrics | metrics

    def _skip(self, adapter: RunAdapter, error: ForgeError) -> None:
        adapter.skipped += 1
        self._warn(f"adapter {adapter.name}: an update was skipped: {error.message}")
        if adapter.skipped >= self._trainer.config.max_skipped_updates:
            adapter.failure = error.message
            self._warn(f"adapter {adapter.name} is trained no more, after {adapter.skipped} skipped updates in a row")

    def _metrics(self, updates: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
        """Average each adapter's metrics over its updates, but sum its tokens; add the tokens of all adapters."""
        stats = {"tokens/trained": 0.0}
        for name, rows in updates.items():
            for key in dict.fromkeys(key for row in rows for key in row):
                numbers = [row[key] for row in rows if key in row]
                is_count = key == "tokens/trained"
                stats[f"{name}/{key}"] = sum(numbers) / (1 if is_count else len(numbers))
            stats["tokens/trained"] += stats.get(f"{name}/tokens/trained", 0.0)
        for name, adapter in self._adapters.items():
            stats |= {f"{name}/updates": float(adapter.updates), f"{name}/skipped": float(adapter.skipped)}
        return stats

    async def publish(self) -> None:
        """Load updated adapters into all engines; the next episodes of their sources are generated with them."""
        for adapter in self._adapters.values():
            if adapter.version == adapter.updates:
                continue
            with self._scratch() as folder:
                await self._trainer.adapters.save(adapter.name, folder)
                self._trainer.adapters_probed.pop(adapter.name, None)  # engines are about to leave that version
                await self._generator.load_adapter(adapter.name, folder)
            # Scored last: probes compare engines with the trainer only once the engines have loaded this version.
            adapter.version = adapter.updates
            await self._trainer.probe_adapter(adapter.name, adapter.version)

    async def save(self, folder: Path) -> None:
        """Write all adapters into a checkpoint's folder."""
        for name in self._adapters:
            (folder / FOLDER / name).mkdir(parents=True)
            await self._trainer.adapters.save(name, folder / FOLDER / name)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the counts of all adapters."""
        return {
            name: {"updates": adapter.updates, "skipped": adapter.skipped, "failure": adapter.failure}
            for name, adapter in self._adapters.items()
        }

    def load_state_dict(self, state: Any) -> None:
        """Adopt the counts; `restore` then brings trainer and engines to the same updates."""
        # An adapter that the state lacks was opened after it was saved, and returns to its first values.
        for name in {*self._adapters, *state}:
            counts = state.get(name, {})
            adapter = self._adapters.setdefault(name, RunAdapter(name=name))
            adapter.updates, adapter.skipped = int(counts.get("updates", 0)), int(counts.get("skipped", 0))
            adapter.failure = str(counts.get("failure", ""))
