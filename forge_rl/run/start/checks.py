"""The checks of a start, once its hosts are known and before its services start: models, tasks, memory and disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from forge_rl.algorithms.protocol import Loss
from forge_rl.data.mixture import Mixture
from forge_rl.data.scan import Lengths, PromptLengths, Scan, check_tasks, lacks_tools
from forge_rl.engines.architecture import (
    Architecture,
    check_weights,
    predicting_layers,
    read_architecture,
    stored_bytes,
)
from forge_rl.engines.context import check_context
from forge_rl.engines.decode_layout import check_decode_layout
from forge_rl.engines.degrees import check_model
from forge_rl.engines.factory import plan_training
from forge_rl.engines.families.general import COMPARED
from forge_rl.engines.families.tensor_plan import TENSOR_COMPARED
from forge_rl.engines.speculation import resolve_draft_model
from forge_rl.errors import ConfigError
from forge_rl.metrics import RunLog
from forge_rl.models.cache import Progress
from forge_rl.models.dequantized import dequantized
from forge_rl.models.resolve import resolve_model
from forge_rl.rollout.examples import ExampleFn, ExampleLengths, ExampleMaker
from forge_rl.run.evaluation.evaluator import HELD_OUT
from forge_rl.run.lora_settings import checkpoint_bytes, lora_lines
from forge_rl.run.plan.defaults import check_teachers, colocated, with_defaults
from forge_rl.run.plan.memory import check_state_fits, plan_run, with_spares_that_fit
from forge_rl.run.plan.placing import PlacedServices
from forge_rl.run.plan.scaled import chosen_values, open_flags, with_scaled
from forge_rl.run.records.run_dir import check_space
from forge_rl.run.records.started_from import ModelKeeper
from forge_rl.run.run_config import RunConfig
from forge_rl.run.run_models import RunModels
from forge_rl.run.start.preparation import PreparedRun
from forge_rl.run.start.setup import RunSetup
from forge_rl.services.teachers import resolve_teachers
from forge_rl.services.trainer_config import CriticConfig, TrainerConfig
from forge_rl.system.memory import host_bytes
from forge_rl.tokens.stops import describe_added_stop
from forge_rl.tokens.template_args import read_template_args
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.tokens.tool_parsers import ToolParser, parser_for
from forge_rl.types import Task

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True, kw_only=True)
class CheckedRun(Generic[C]):
    """Results of the checks: the settings with all choices, models, and tasks to evaluate on."""

    config: C
    """The settings, including the values chosen for flags that the user left open."""
    models: RunModels
    """Its models, as folders with weights that can be trained."""
    shares_devices: bool
    """Whether trainer and engines share devices."""
    sets: Mapping[str, Sequence[Task]]
    """Sets to evaluate on, by name; none if evaluation is off."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """Values of flags that the user left open, which a resumed run keeps."""


async def check(config: C, prepared: PreparedRun, setup: RunSetup, placed: PlacedServices) -> CheckedRun[C]:
    """Refuse models that cannot be trained, laid out or stored, and tasks that cannot be used, before services start.

    Args:
        setup: what the run trains on.
        placed: the hosts of each service.

    Raises:
        ForgeError: says what does not fit, and what to change.
    """
    # Again, as the devices of a job's hosts are known only now. A recipe of one's own may bring a critic by code.
    config.check_effects()
    if setup.critic is not None:
        setup.critic.check_devices()
    log, progress = prepared.monitor.log, prepared.monitor.display.progress
    reference, values = "reference" in setup.loss.needs, "values" in setup.loss.needs
    # A resumed run keeps the models that it began with: a link or a hub id may lead elsewhere by now.
    keeper = ModelKeeper(
        run=prepared.folder, resumes=prepared.checkpoint is not None, force=config.force_continue, tell=log.warn
    )
    model = (await asyncio.to_thread(resolve_model, config.model, config.cache, progress)).resolve()
    # The model's own weights are used after a resume too: by a frozen reference, or below the adapters of a checkpoint.
    keeps_weights = reference or config.lora.rank > 0
    model = await asyncio.to_thread(keeper.keep, "--model", config.model, model, weights=keeps_weights)
    drafts = await asyncio.to_thread(resolve_draft_model, config.generator.speculation, model, config.cache, progress)
    config = replace(config, generator=replace(config.generator, speculation=drafts))
    architecture = await asyncio.to_thread(read_architecture, model, config.trainer.modelling)
    # The names of quantised weights are checked below, once they are converted.
    unused = [] if architecture.quantized else check_weights(model, architecture, values=values)
    check_model(config.trainer, config.trainer.ranks, architecture)
    critic, folders = await asyncio.to_thread(_resolved, config, model, setup, progress, keeper)
    # Before anything is chosen: a chosen value no longer counts as open.
    flags = open_flags(config, critic)
    config, critic, scaled_lines = with_scaled(
        config,
        critic,
        architecture=architecture,
        critics=None if critic is None else read_architecture(Path(critic.model or model), critic.modelling),
        earlier=_choices_of(prepared),
    )
    # In a thread: tracing a model on the meta device takes seconds, in which the display must go on.
    choosing = partial(with_defaults, config, model, reference=reference, values=values, critic=critic)
    config, critic, choices = await asyncio.to_thread(choosing)
    choices = [*scaled_lines, *choices]
    if architecture.family.general and not _is_compared(architecture, config.trainer):
        # A pass on the meta device: what does not run on packed rows is refused before services start.
        passing = partial(
            plan_training, model, config.trainer, ranks=config.trainer.ranks, reference=reference, values=values
        )
        await asyncio.to_thread(passing)
    if setup.teachers is not None:
        check_teachers(config, setup.teachers, folders)
    models = RunModels(
        policy=model,
        reference=reference,
        values=values,
        critic=critic,
        teachers=setup.teachers,
        teacher_folders=folders,
    )
    # Spares only save time when an engine dies, so a run that has no memory for them goes on without.
    if config.generator.spares and config.starts_engines:
        needs = await asyncio.to_thread(plan_run, config, models)
        config, choices = with_spares_that_fit(config, needs, choices, host=host_bytes())
    # All choices are made: show them, and refuse what cannot fit by the cheap count of states alone.
    for line in lora_lines(config, values=values):
        log.event(line)
    for line in choices:
        log.event(f"chosen: {line}")
    check_state_fits(config, models)
    if architecture.quantized:
        # Engines and trainer both start from one copy in bfloat16, which is made once and kept in the cache.
        log.event(f"{config.model} is quantised: engines and trainer use its weights in bfloat16")
        model = await asyncio.to_thread(dequantized, model, config.cache, progress)
        architecture = await asyncio.to_thread(read_architecture, model, config.trainer.modelling)
        unused = check_weights(model, architecture, values=values)
    if unused:
        log.warn(
            f"{config.model} holds {len(unused)} weights that are not used, such as {unused[0]!r:.120}: checkpoints "
            "keep them unchanged"
        )
    _tell_of_model(config, model, architecture, setup.loss, log)
    models = replace(models, policy=model)
    await _check_use(config, prepared, setup, models, architecture)
    return CheckedRun(
        config=config,
        models=models,
        # On hosts of their own, neither has the other's devices, whatever --placement says.
        shares_devices=colocated(config) and placed.meet,
        sets=_evaluation_sets(config, setup.mixture, setup.evaluation, log.warn),
        choices=chosen_values(flags, config, critic),
    )


def _choices_of(prepared: PreparedRun) -> Mapping[str, Any] | None:
    """Return the values that a resumed run began with where flags were open; None for a new run."""
    if prepared.checkpoint is None:
        return None
    choices = prepared.checkpoint.controller_state().get("choices")
    return choices if isinstance(choices, dict) else {}


def _evaluation_sets(
    config: RunConfig, mixture: Mixture, evaluation: Mapping[str, Sequence[Task]] | None, warn: Callable[[str], None]
) -> Mapping[str, Sequence[Task]]:
    """Return the tasks to evaluate on by set name: `evaluation` if given, else the mixture's own sets."""
    if not config.evaluation.every:
        return {}
    if evaluation is not None:
        return evaluation
    sets = mixture.eval_sets(config.evaluation.tasks)
    if 0 < (num_held_out := len(sets.get(HELD_OUT, ()))) < config.evaluation.tasks:
        warn(f"there are only {num_held_out} distinct held-out tasks")
    if not any(sets.values()) and config.evaluation.tasks:
        warn(
            "nothing is evaluated, as no task is held out: name some with --eval-tasks, raise --data.held-out-share "
            "if --tasks are few, or set --evaluation.every 0"
        )
    return sets


def rounded_rollouts(quantization: str, loss: Loss) -> str:
    """Return a warning if engines round their weights and the loss does not correct for it, or ""."""
    correction = getattr(loss, "correction", None)
    if quantization == "none" or (correction is not None and (correction.mode != "none" or correction.reject)):
        return ""
    return (
        f"engines decode with weights rounded to {quantization}, and the loss does not correct for the difference: "
        "set --loss NAME:correction=tis, or watch the gap between engine and trainer"
    )


def _is_compared(architecture: Architecture, trainer: TrainerConfig) -> bool:
    """Return whether results of a model on transformers' code were compared with transformers in such a layout."""
    kind = architecture.family.model_type
    return kind in COMPARED and (trainer.tensor_parallel_degree == 1 or kind in TENSOR_COMPARED)


def _tell_of_model(config: RunConfig, model: Path, architecture: Architecture, loss: Loss, log: RunLog) -> None:
    """Warn about weights that contradict config.json or are not trained, and about engines that decode with rounded
    weights while the loss does not correct for it."""
    name = config.model
    if warning := rounded_rollouts(config.generator.quantization, loss):
        log.warn(warning)
    if architecture.family.general:
        kind = architecture.family.model_type
        split = ", its matrices by tensor parallelism" if config.trainer.tensor_parallel_degree > 1 else ""
        log.event(f"{name} is a {kind!r}: transformers' code trains it, sharded by FSDP{split}")
        if not _is_compared(architecture, config.trainer):
            log.warn(
                f"a {kind!r} on packed rows{split and ' of tensor-parallel ranks'} was never compared with "
                "transformers, one episode at a time: watch the gap "
                "between engine and trainer, logprob_gap, from the first step on"
            )
    if architecture.untied_by_files:
        log.warn(
            f"config.json of {name} has tie_word_embeddings, but its files hold an lm_head.weight that differs from "
            "the embedding: that head is used and trained, and config.json of checkpoints will say so"
        )
    num_listed, num_stored = architecture.predicting_layers, predicting_layers(model, architecture)
    if num_stored:
        log.event(f"{name} has {num_stored} multi-token-prediction layers: not trained, exported unchanged")
    if num_stored < num_listed:
        log.warn(
            f"config.json of {name} lists {num_listed} multi-token-prediction layers, its files hold {num_stored}: "
            "checkpoints will lack them too; give the complete model with --model if engines are to draft with them"
        )


def _resolved(
    config: RunConfig, model: Path, setup: RunSetup, progress: Progress, keeper: ModelKeeper
) -> tuple[CriticConfig | None, dict[str, Path]]:
    """Return the critic's settings with the folder of its model, and the folder of each teacher."""
    critic, teachers = setup.critic, setup.teachers
    if critic is not None and critic.model:
        folder = resolve_model(critic.model, config.cache, progress).resolve()
        folder = keeper.keep("--critic.model", critic.model, folder, weights=False)
        if read_architecture(folder, critic.modelling).quantized:
            folder = dequantized(folder, config.cache, progress)
        check_weights(folder, read_architecture(folder, critic.modelling), values=True)
        critic = replace(critic, model=str(folder))
    folders = {} if teachers is None else resolve_teachers(teachers, model, config.cache, progress)
    kept_folders = {
        name: keeper.keep(f"teacher {name}", name, folder, weights=True) for name, folder in folders.items()
    }
    return critic, kept_folders


async def _check_use(
    config: RunConfig, prepared: PreparedRun, setup: RunSetup, models: RunModels, architecture: Architecture
) -> None:
    """Check the model against the engines, the tasks, the parser of tool calls and the disk's free space."""
    model = models.policy
    if config.starts_engines:
        check_decode_layout(model, config.generator, engines=config.generator.replicas)
        check_context(architecture, config.generator)
    args = read_template_args(config.template_args)
    tokenizer = await asyncio.to_thread(
        partial(Tokenizer, model, parse_control_tokens=config.parse_control_tokens, template_args=args)
    )
    if note := describe_added_stop(tokenizer):
        prepared.monitor.log.event(note)
    scans = await _check_tasks(config, prepared, setup.mixture, tokenizer, setup.examples)
    if config.tool_parser:
        # Loaded for its error: an unknown parser would otherwise fail at the first answer.
        await ToolParser(config.tool_parser, tokenizer).load()
        if setup.rollouts is not None and not setup.rollouts.shows_tools:
            _check_tools(setup, scans)
    elif setup.uses_tools:
        # No parser is named, so one must read back the calls that the chat template writes.
        await asyncio.to_thread(parser_for, tokenizer)
    check_disk(config, prepared, models)


def check_disk(config: RunConfig, prepared: PreparedRun, models: RunModels) -> None:
    """Check that there is disk space for the checkpoints that the run still has to write, if it writes any.

    Raises:
        CheckpointError: there is too little.
    """
    if config.checkpoint_every:
        # Float32 weights and two moments, 12 bytes a weight, and the exported copy: 14 for weights stored in 2 bytes.
        bytes_each = 7 * stored_bytes(models.policy)
        if config.lora.rank:
            bytes_each = checkpoint_bytes(config.lora, 0, models.policy)
        if models.critic is not None:
            bytes_each += 7 * stored_bytes(models.critic_folder)
        # The newest, one that is being written before the oldest goes, and the best. A resumed run has some of them on
        # disk, and needs room for the one that is being written at least.
        max_checkpoints = config.keep_checkpoints + 1 + config.evaluation.keep_best
        check_space(prepared.folder, bytes_each * max(1, max_checkpoints - len(prepared.checkpoints.all())))


async def _check_tasks(
    config: RunConfig, prepared: PreparedRun, mixture: Mixture, tokenizer: Tokenizer, examples: ExampleFn | None
) -> dict[str, Scan]:
    """Refuse task files that cannot be used or, in a resumed run, have changed; log each one's scan, and return all."""
    # Sources move to their saved places before services start, so that files that have changed are refused at once.
    match prepared.checkpoint.controller_state() if prepared.checkpoint is not None else None:
        case {"rollouts": {"mixture": dict(saved)}}:
            mixture.restore_sources(saved)

    limit, measured = config.generator.max_model_len - config.generator.max_tokens, PromptLengths.measured
    if examples is not None:
        limit, measured = longest_example(config, tokenizer.folder), ExampleLengths.measured

    def lengths() -> Lengths:
        if examples is None:
            return PromptLengths(tokenizer, limit)
        return ExampleLengths(ExampleMaker(examples, tokenizer, longest=limit))

    progress = prepared.monitor.display.progress
    scans = await asyncio.to_thread(check_tasks, mixture, lengths, cache=config.cache, progress=progress)
    for name, scan in scans.items():
        prepared.monitor.log.event(f"{name}: {scan.describe(limit, measured)}")
    return scans


def _check_tools(setup: RunSetup, scans: Mapping[str, Scan]) -> None:
    """Refuse a parser of tool calls if neither an environment nor a task brings tools.

    Args:
        scans: results of `check_tasks`. A source made by code may bring tools, so nothing is refused if there is one.

    Raises:
        ConfigError: no task has tools.
    """
    evaluation_tasks = (task for tasks in (setup.evaluation or {}).values() for task in tasks)
    if lacks_tools(setup.mixture, scans) and not any(task.tools for task in evaluation_tasks):
        raise ConfigError(
            "--tool-parser has no effect, as no task has tools, and no --env brings any",
            hint="leave it out, name an --env with tools, or give rows a column of tools",
        )


def longest_example(config: RunConfig, model: Path) -> int:
    """Return the maximum tokens of an example: the length of a row, or the model's positions if these are fewer."""
    return min(config.trainer.longest_row, read_architecture(model, config.trainer.modelling).max_positions)
