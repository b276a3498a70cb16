"""Trains several adapters over one base, each with its own weights, gradients, optimizer and count of updates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.adapter_settings import AdamStep, AdapterPass, AdapterSettings, PassResult
from forge_rl.engines.families.general import row_mixing_problem
from forge_rl.engines.lora_config import adapted_modules, check_shared_base
from forge_rl.engines.titan.adapter_files import AdapterState, read_state, write_state
from forge_rl.engines.titan.adapter_switch import AdapterSwitch
from forge_rl.engines.titan.lora import adapted_modules_of, first_factor
from forge_rl.engines.titan.measures import Measures, measured_loss
from forge_rl.engines.titan.mixed_rows import MixedPass, run_mixed
from forge_rl.engines.titan.scoring import reshard
from forge_rl.engines.titan.shards import ADAPTERS, publishes, slice_of, values_of
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.engines.titan.update import RowResults, Update
from forge_rl.errors import ConfigError, ForgeError, LossError
from forge_rl.metrics import Mean, Sum, Value
from forge_rl.packing.rows import Minibatch

_MOMENTS = "exp_avg", "exp_avg_sq"


@dataclass(eq=False)
class _ResidentAdapter:
    """State of one adapter's training. While it is in the model, `values` is empty."""

    settings: AdapterSettings
    optimizer: torch.optim.Optimizer
    values: list[torch.Tensor]
    """This rank's part of A and B of every adapted module."""
    grads: list[torch.Tensor | None]
    results: RowResults = field(default_factory=lambda: RowResults(rows=0))
    """Results of the passes since the last step."""
    updates: int = 0
    planned: int = 0
    """Number of passes so far, from which each draws its dropout."""


class TitanAdapters:
    """Several named adapters over one model, whose parameters hold one adapter at a time.

        adapters = TitanAdapters(engine, folder)
        adapters.open("math", AdapterSettings(lora=LoRAConfig(rank=8), seed=1))
        adapters.run("math", minibatch, loss)
        adapters.step("math", AdamStep(lr=1e-4))

    All adapters are stored in the shape of the engine's own, with the largest rank and all targets. The rows of A and
    columns of B past an adapter's rank are 0, and so are both factors of modules that it does not target. Their
    gradients are products with the other factor's zeros, so they stay 0.

    Every rank makes the same calls in the same order. A failed call leaves weights, gradients, moments and counts of
    all adapters as they were, except that `step` drops gradients that add up to a number that is not finite, as every
    later step would fail on them.

    Args:
        engine: engine of a model with adapters.
        folder: Hugging Face folder of the base.
    """

    def __init__(self, engine: TitanEngine, folder: Path) -> None:
        if engine.model.adapters is None:
            raise ConfigError("the trainer has no adapters", hint="set --lora.rank to the largest rank of an adapter")
        check_shared_base(engine.model.adapters.lora)
        if not isinstance(engine.optimizer, torch.optim.AdamW):
            raise ConfigError(
                "adapters over one base have moments in float32",
                hint="leave out --trainer.optimizer-state",
            )
        self._engine = engine
        self._folder = folder
        self._modules = list(adapted_modules_of(engine.model))
        self._switch = engine.model.adapters
        self._largest = self._switch.lora
        self._trainings: dict[str, _ResidentAdapter] = {}
        # The engine's own adapter is in the model from the start, so it holds no values of its own yet.
        self._initial = self._active = self._new(
            AdapterSettings(lora=self._largest, seed=self._switch.seed), engine.optimizer
        )
        self._active.updates, self._active.planned = engine.updates, engine.planned

    def open(self, name: str, settings: AdapterSettings) -> None:
        """Add an adapter, with the same first values as if it were trained alone with this seed.

        Raises:
            ConfigError: the name is taken, or the rank or a target is not within the trainer's.
        """
        if name in self._trainings:
            raise ConfigError(f"there is an adapter {name!r:.80} already", hint="choose another name")
        lora = settings.lora
        if not 0 < lora.rank <= self._largest.rank:
            raise ConfigError(
                f"the rank of adapter {name!r:.80} is {lora.rank}, and the trainer's largest is {self._largest.rank}",
                hint="choose a smaller rank, or raise --lora.rank",
            )
        if lora.dropout != self._largest.dropout:
            raise ConfigError(f"dropout {lora.dropout} is not the trainer's {self._largest.dropout}")
        architecture = self._engine.architecture
        targets = adapted_modules(architecture, lora)
        if missing := targets.keys() - adapted_modules(architecture, self._largest).keys():
            raise ConfigError(
                f"adapter {name!r:.80} targets {targets[min(missing)]}, which has no adapter in this trainer",
                hint="add it to --lora.targets",
            )
        # Engines load the very values that a training resumes from.
        settings = replace(settings, lora=replace(lora, dtype="float32"))
        training = self._new(settings, self._engine.new_optimizer())
        for parameter, (weight_name, module, kind) in zip(self._parameters(), self._factors(), strict=True):
            # Every rank draws the whole factor and keeps its slice, so first values do not depend on the layout.
            full = torch.zeros(parameter.shape)
            if kind == ADAPTERS[0] and _is_target(weight_name, targets):
                full[: lora.rank] = first_factor(module.adapter_name, (lora.rank, module.in_features), settings.seed)
            values = torch.empty_like(values_of(parameter))
            training.values.append(values.copy_(slice_of(parameter).of(full)))
        training.grads = [None] * len(training.values)
        self._trainings[name] = training

    def drop(self, name: str) -> None:
        """Forget an adapter."""
        training = self._training(name)
        if training is self._active:
            self.rest()
        del self._trainings[name]

    def rest(self) -> None:
        """Put the engine's own adapter, its gradients and its count of updates back in place."""
        self._activate(self._initial)

    def updates(self, name: str) -> int:
        """Number of an adapter's optimizer steps."""
        training = self._training(name)
        return self._engine.updates if training is self._active else training.updates

    def run(self, name: str, minibatch: Minibatch, loss: Loss, *, backward: bool = True) -> PassResult:
        """Run a pass over rows; with `backward`, add its gradient to those that `step` will use.

        Args:
            minibatch: this share's rows, as `TrainEngine.train_batch` gets them.

        Raises:
            LossError: the loss failed, or its gradient is not finite.
        """
        training, engine = self._training(name), self._engine
        self._activate(training)
        engine.onload()
        # The pass's logprobs are part of its result, so scores are always kept.
        update = Update(minibatch=minibatch, loss=loss, keeps_scores=True)
        if not backward:
            with engine.forgetting_failures(keeps_gradients=True):
                return self._score(update)
        # The gradients of earlier passes are set aside: a failing pass loses only its own.
        earlier = self._take_gradients()
        try:
            with engine.forgetting_failures():
                results = engine.forward_backward(update)
                engine.raise_if_failed(results.errors)
                self._check_finite()
        except BaseException:
            self._put_gradients(earlier)
            raise
        # A parameter that got no gradient in this pass keeps the earlier one.
        for parameter, grad in zip(self._parameters(), earlier, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        engine.planned += 1
        # Routers' counts accumulate over all passes of a step, as gradients do.
        training.results.expert_counts += results.expert_counts
        training.results.rank_loads += results.rank_loads
        return PassResult(
            metrics=results.measures.read()[0], logprobs=[scores[:, 0].cpu() for scores in results.scores]
        )

    def run_many(self, passes: Sequence[AdapterPass]) -> list[PassResult | ForgeError]:
        """Run passes of several adapters, whose rows are computed together where they fit into one.

        Each pass has the result of `run`, within rounding. What fails or is not finite in one changes no other.

        Returns:
            For each pass its result, or the error that `run` would have raised.

        Raises:
            ConfigError: the trainer has several ranks or a model that cannot, or an adapter has two passes.
        """
        engine = self._engine
        a, problem = engine.architecture, ""
        if dist.get_world_size() > 1:
            problem = "the trainer has several ranks"
        elif a.experts is not None:
            problem = "its experts multiply tokens of all rows together"
        elif a.folder is not None:
            problem = row_mixing_problem(a.folder)
        if problem:
            raise ConfigError(
                f"rows of several adapters cannot be computed together: {problem}",
                hint="run each adapter's passes apart",
            )
        if len({adapter_pass.name for adapter_pass in passes}) < len(passes):
            raise ConfigError("an adapter has two passes at a time", hint="run them in turn")
        # Afterwards every named adapter holds its own tensors, which `_mixed_pass` makes leaves of.
        self.rest()
        engine.onload()
        mixed = {
            adapter_pass.name: self._mixed_pass(adapter_pass, self._trainings[adapter_pass.name])
            for adapter_pass in passes
            if adapter_pass.name in self._trainings
        }
        with engine.forgetting_failures(keeps_gradients=True):
            run_mixed(engine, list(mixed.values()), engine.longest_row)
        names = [adapter_pass.name for adapter_pass in passes]
        # An unknown name fails only its own pass.
        return [self._kept(mixed[name], self._trainings[name]) if name in mixed else _unknown(name) for name in names]

    def step(self, name: str, adam: AdamStep) -> dict[str, Value]:
        """Take an optimizer step with the gradients of the passes since the last one, and clear them.

        Raises:
            ConfigError: no pass has added a gradient since the last step.
            LossError: the gradients add up to a number that is not finite; they are dropped.
        """
        training, engine = self._training(name), self._engine
        self._activate(training)
        engine.onload()
        if all(parameter.grad is None for parameter in self._parameters()):
            raise ConfigError(
                f"adapter {name!r:.80} has no gradient for an optimizer step",
                hint="run forward_backward before optim_step, and look at its error if it failed",
            )
        for group in engine.optimizer.param_groups:
            # A step brings its own settings, whatever the optimizer was made with.
            group.update(betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay)
        metrics = engine.optimizer_step(training.results, lr=adam.lr, max_grad_norm=adam.max_grad_norm)
        training.results = RowResults(rows=0)
        if metrics is None:
            raise LossError(
                f"the gradients of adapter {name!r:.80} add up to a number that is not finite, and are dropped",
                hint="lower the learning rate, or take a step after fewer passes",
            )
        return metrics

    def save(self, name: str, folder: Path) -> None:
        """Write an adapter into an existing folder of the first rank's host, in PEFT's format, with its moments and
        counts; gradients are not saved.

        Raises:
            CheckpointError: the first rank cannot write it, such as on a full disk.
        """
        training = self._training(name)
        self._activate(training)
        self._engine.onload()
        optimizer = self._engine.optimizer
        groups = {"values": [values_of(parameter) for parameter in self._parameters()]}
        # AdamW creates its moments at the first step.
        if self._engine.updates:
            for moment in _MOMENTS:
                groups[moment] = [values_of(optimizer.state[parameter][moment]) for parameter in self._parameters()]
        full = {kind: self._whole(parts) for kind, parts in groups.items()}
        # The other ranks return only once the first one has written the files.
        with _raising_on_all_ranks():
            if dist.get_rank() == 0:
                self._write(training, full, folder)

    def load(self, name: str, folder: Path, *, optimizer: bool) -> int:
        """Load an adapter's weights from a folder that `save` or peft wrote, and drop its gradients.

        Args:
            optimizer: load its moments and count of updates too, else start with none.

        Returns:
            The number of updates.

        Raises:
            CheckpointError, ModelError: a file is missing or malformed, or of another rank or other modules.
            ConfigError: the adapter was saved with another scale.
        """
        training = self._training(name)
        # Everything is read and checked before the model is touched: a file that does not fit changes nothing, on any
        # rank.
        with _raising_on_all_ranks():
            state, wholes = self._read(training, folder, with_optimizer=optimizer)
        self._activate(training)
        self._engine.onload()
        optimizer_state = self._engine.new_optimizer()
        for index, parameter in enumerate(self._parameters()):
            place = slice_of(parameter)
            values_of(parameter).copy_(place.of(wholes["values"][index]))
            parameter.grad = None
            if state.updates:
                moments = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in _MOMENTS}
                for kind, moment in moments.items():
                    values_of(moment).copy_(place.of(wholes[kind][index]))
                # Fused AdamW expects the count on the weight's device.
                step = torch.tensor(float(state.updates), device=values_of(parameter).device)
                optimizer_state.state[parameter] = {"step": step, **moments}
        self._engine.optimizer = training.optimizer = optimizer_state
        self._engine.updates = training.updates = state.updates
        self._engine.planned = training.planned = state.planned
        training.results = RowResults(rows=0)
        return state.updates

    def _new(self, settings: AdapterSettings, optimizer: torch.optim.Optimizer) -> _ResidentAdapter:
        return _ResidentAdapter(settings, optimizer, values=[], grads=[])

    def _training(self, name: str) -> _ResidentAdapter:
        if name not in self._trainings:
            raise _unknown(name)
        return self._trainings[name]

    def _targets(self, training: _ResidentAdapter) -> dict[str, str]:
        return adapted_modules(self._engine.architecture, training.settings.lora)

    def _factors(self) -> Iterator[tuple[str, Any, str]]:
        """Yield torchtitan's name of each adapted weight, its module, and the name of each factor."""
        yield from ((name, module, factor) for name, module in self._modules for factor in ADAPTERS)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [getattr(module, factor) for _, module, factor in self._factors()]

    def _activate(self, training: _ResidentAdapter) -> None:
        """Put an adapter into the model: swap tensors or, where FSDP owns the parameters' memory, copy them."""
        active, engine = self._active, self._engine
        if training is active:
            return
        # Offloaded tensors are empty, and a copy of one would stay so.
        engine.onload()
        parameters = self._parameters()
        active.grads = self._take_gradients()
        active.updates, active.planned, active.optimizer = engine.updates, engine.planned, engine.optimizer
        # Copies made for the passes belong to the outgoing adapter: drop them before its tensors are swapped.
        reshard(engine.model)
        for parameter, values in zip(parameters, training.values, strict=True):
            if isinstance(parameter, DTensor):
                active.values.append(values_of(parameter).clone())
                # FSDP owns this memory, so values are copied into it rather than swapped.
                values_of(parameter).copy_(values)
            else:
                active.values.append(parameter.data)
                parameter.data = values
        training.values = []
        self._put_gradients(training.grads)
        training.grads = []
        engine.optimizer, engine.updates, engine.planned = training.optimizer, training.updates, training.planned
        self._switch.lora, self._switch.seed = training.settings.lora, training.settings.seed
        self._active = training

    def _mixed_pass(self, adapter_pass: AdapterPass, training: _ResidentAdapter) -> MixedPass:
        leaves = [values.detach().requires_grad_() for values in training.values]
        names = [module.adapter_name for _, module in self._modules]
        return MixedPass(
            update=Update(minibatch=adapter_pass.minibatch, loss=adapter_pass.loss),
            backward=adapter_pass.backward,
            switch=AdapterSwitch(training.settings.lora, training.settings.seed),
            planned=training.planned,
            factors=dict(zip(names, zip(leaves[::2], leaves[1::2], strict=True), strict=True)),
        )

    def _kept(self, mixed_pass: MixedPass, training: _ResidentAdapter) -> PassResult | ForgeError:
        """Add a pass's gradient to its adapter's; returns its results, or its error."""
        if mixed_pass.error is not None:
            return mixed_pass.error
        if mixed_pass.backward:
            training.planned += 1
            for index, (parameter, leaf) in enumerate(zip(self._parameters(), mixed_pass.leaves(), strict=True)):
                if (grad := leaf.grad) is None:
                    continue
                if isinstance(parameter, DTensor):
                    # A leaf holds this rank's part; the parameter's gradient must be distributed like it.
                    grad = DTensor.from_local(grad, parameter.device_mesh, parameter.placements, run_check=False)
                earlier = training.grads[index]
                training.grads[index] = grad if earlier is None else earlier.add_(grad)
        logprobs = [scores.cpu() for _, scores in sorted(mixed_pass.logprobs.items())]
        return PassResult(metrics=mixed_pass.measures.read()[0], logprobs=logprobs)

    def _take_gradients(self) -> list[torch.Tensor | None]:
        grads = [parameter.grad for parameter in self._parameters()]
        self._put_gradients([None] * len(grads))
        return grads

    def _put_gradients(self, grads: Sequence[torch.Tensor | None]) -> None:
        for parameter, grad in zip(self._parameters(), grads, strict=True):
            parameter.grad = grad

    def _check_finite(self) -> None:
        """Raise LossError on all ranks if a gradient is not finite on one."""
        grads = [values_of(parameter.grad) for parameter in self._parameters() if parameter.grad is not None]
        if not grads:  # the pass had no rows
            return
        # A sum of absolute values is finite only if every element is, so one number per gradient is enough.
        sums = torch.stack([grad.abs().sum() for grad in grads])
        is_bad = (~sums.isfinite()).any().to(torch.int32)
        dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
        if bool(is_bad):
            raise LossError(
                "the gradient of this pass is not finite, and is dropped",
                hint="look for NaN or infinite numbers in its rows, or lower the learning rate",
            )

    @torch.no_grad()
    def _score(self, update: Update) -> PassResult:
        """Compute the loss and the logprobs of rows, without a gradient."""
        engine, measures, errors = self._engine, Measures(), list[ForgeError]()
        logprobs = []
        # Counts of a minibatch add up to 1, as in `TitanEngine.forward_backward`.
        share = 1 / (max(1, len(update.minibatch.rows)) * engine.shares)
        for index, statistics in enumerate(engine.row_statistics(update, errors)):
            device_row = engine.scorer.on_device(update.minibatch.rows[index])
            scores = engine.scorer.score(engine.model, device_row, update.scoring)
            inputs = update.inputs(index, device_row.row, scores, statistics)
            row_loss = measured_loss(update.loss, inputs, measures, errors) / update.divisor
            measures.add("tokens/trained", Sum, device_row.tokens)
            measures.add("loss", Mean, row_loss, share)
            logprobs.append(inputs.logprobs.cpu())
        reshard(engine.model)
        engine.raise_if_failed(errors)
        return PassResult(metrics=measures.read()[0], logprobs=logprobs)

    def _whole(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gather tensors that are sharded as the parameters are, in host memory."""
        parameters, ranks = self._parameters(), range(dist.get_world_size())
        sizes = [math.prod(parameter.shape) for parameter in parameters]
        flat = torch.zeros(sum(sizes), dtype=parts[0].dtype, device=parts[0].device)
        wholes = [place.view(p.shape) for p, place in zip(parameters, flat.split(sizes), strict=True)]
        for parameter, full, part in zip(parameters, wholes, parts, strict=True):
            if publishes(parameter, ranks):
                slice_of(parameter).of(full).copy_(part)
        if len(ranks) > 1:
            dist.all_reduce(flat)  # sums one rank's values and zeros: no rounding
        return [full.cpu() for full in wholes]

    def _write(self, training: _ResidentAdapter, full: Mapping[str, Sequence[torch.Tensor]], folder: Path) -> None:
        """Write the files of an adapter from whole factors and moments."""
        lora, targets = training.settings.lora, self._targets(training)
        tensors: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in full}
        for kind, parts in full.items():
            for part, (weight_name, module, factor) in zip(parts, self._factors(), strict=True):
                if _is_target(weight_name, targets):
                    cut = part[: lora.rank] if factor == ADAPTERS[0] else part[:, : lora.rank]
                    tensors[kind][f"{module.adapter_name}/{factor}"] = cut
        state = AdapterState(
            scale=lora.scale, updates=self._engine.updates, planned=self._engine.planned, tensors=tensors
        )
        write_state(folder, state, training.settings, base=self._folder)

    def _read(
        self, training: _ResidentAdapter, folder: Path, *, with_optimizer: bool
    ) -> tuple[AdapterState, dict[str, list[torch.Tensor]]]:
        """Read the files of an adapter; return its state, and each kind of its tensors in the shapes of the model's."""
        state, lora = read_state(folder, with_optimizer=with_optimizer), training.settings.lora
        if not math.isclose(state.scale, lora.scale):
            raise ConfigError(
                f"the saved adapter has scale {state.scale:g}, and this one {lora.scale:g}",
                hint="open the adapter with the rank and alpha that were saved",
            )
        targets = self._targets(training)
        names = [
            f"{module.adapter_name}/{factor}" if _is_target(weight_name, targets) else ""
            for weight_name, module, factor in self._factors()
        ]
        return state, {kind: self._padded(state, kind, names, lora.rank) for kind in state.tensors}

    def _padded(self, state: AdapterState, kind: str, names: Sequence[str], rank: int) -> list[torch.Tensor]:
        """Return one kind of tensors of a state for each factor, with zeros past the adapter's rank."""
        state.check(kind, {name for name in names if name})
        padded = []
        for name, parameter in zip(names, self._parameters(), strict=True):
            full = torch.zeros(parameter.shape)
            if name:
                is_a = name.endswith(ADAPTERS[0])
                place = full[:rank] if is_a else full[:, :rank]
                place.copy_(state.tensor(kind, name, tuple(place.shape)))
            padded.append(full)
        return padded


@contextlib.contextmanager
def _raising_on_all_ranks() -> Iterator[None]:
    """Raise an error of the body on all ranks; the body calls no other rank."""
    error: ForgeError | None = None
    try:
        yield
    except ForgeError as raised:
        error = raised
    # Even a failing rank must join this collective, or the others would wait for it.
    errors = [error] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if error := next(filter(None, errors), None):
        raise error


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"there is no adapter {name!r:.80}", hint="open it first")


def _is_target(weight_name: str, targets: dict[str, str]) -> bool:
    return any(weight_name.endswith(f".{module}.weight") for module in targets)
