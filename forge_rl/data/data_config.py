"""Data config shared by recipes."""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro

from forge_rl.data.mixture import Mixture
from forge_rl.data.sources import (
    Columns,
    IterableSource,
    ReasoningGymSource,
    Source,
    TableSource,
    hub,
)
from forge_rl.data.sources.files import TABLES, find_files, is_path, open_tables
from forge_rl.data.sources.reasoning_gym import has_dataset
from forge_rl.data.sources.rows import Kind
from forge_rl.data.sources.tables import Table
from forge_rl.errors import ConfigError, TaskError, check_flags
from forge_rl.flags import user_code
from forge_rl.flags.categories import Operational
from forge_rl.flags.options import check_keys
from forge_rl.flags.texts import FlagText, parse
from forge_rl.models.hub import is_hub_id

ONE_DIGIT_ADDITION = (
    "basic_arithmetic:min_terms=2,max_terms=2,min_digits=1,max_digits=1,operators=[+],allow_parentheses=false,"
    "format_style=natural"
)
"""Additions such as "Calculate 4 + 7.", in many wordings."""

TaskTexts: TypeAlias = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        help="The mixture, as NAME[:KEY=VALUE,...][*WEIGHT]: files, folders, hub ids, reasoning-gym data sets, or "
        "FILE.py:NAME. Keys of files name columns: data/*.jsonl:question=problem,answer=solution*0.7"
    ),
]
"""Type of a field of texts for `DataConfig.build`."""

_NUMBERS = " Answer with a number."
_GENERATED_SHARE = 0.25
_FILE_SHARE = 0.1
_PAIR = ("chosen", "rejected")
_COLUMNS = tuple(field.name for field in dataclasses.fields(Columns) if field.name not in ("kind", *_PAIR))
_HUB_KEYS = ("config", "split", "revision")
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)
"""The name of a split, as a whole word."""


@dataclass(frozen=True, kw_only=True)
class _Purpose:
    """What sources are built for."""

    seed: int
    kind: Kind
    cache: Path | None
    is_trained: bool
    """False if all of their rows are held out."""
    is_evaluated: bool
    """Whether there are sources to evaluate on."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings for tasks from files, the hub or reasoning-gym: how prompts are built and which tasks are held out.

    sources = DataConfig().build(["data/train.jsonl:question=problem,answer=solution*0.7", "chain_sum*0.3"], seed=0)
    """

    instruction: str | None = None
    """Text appended to every question. Defaults to " Answer with a number." for reasoning-gym and to nothing for
    files."""
    system: str = ""
    """System message for tasks without their own; if empty, the chat template's default applies."""
    template: str = ""
    """Jinja template, or a .jinja file, that renders a row's columns into the user message. If it has a block
    `messages`, the block renders a JSON list of chat messages instead."""
    held_out_share: float | None = None
    """Share of problems held out for evaluation, selected by the problem's content, not by the seed. Defaults to 0.25
    for generated tasks and 0.1 for files, or 0 for files if --eval-tasks is set."""
    max_bad_rows: Operational[float] = 0.0
    """Maximum share of a file's rows that may be bad; they are skipped and counted. With 0, the first is an error."""
    overlap: Literal["refuse", "leave-out"] = "refuse"
    """Handling of problems in --eval-tasks that are also training tasks: an error, or leave them out of training."""

    def __post_init__(self) -> None:
        check_flags(self, "--data.", minimum={"max_bad_rows": 0}, below={"max_bad_rows": 1})
        if self.held_out_share is not None and not 0 < self.held_out_share < 1:
            raise ConfigError(
                f"--data.held-out-share is {self.held_out_share}", hint="set --data.held-out-share between 0 and 1"
            )

    def build(
        self,
        tasks: Sequence[str],
        *,
        seed: int,
        eval_tasks: Sequence[str] = (),
        kind: Kind = "prompt",
        cache: Path | None = None,
    ) -> Mixture:
        """Build the mixture of tasks given as texts, see `flags.texts.parse`; the seed orders training tasks.

        A name is a reasoning-gym data set, a file, a folder, a glob pattern, a hub id, or FILE.py:NAME, where NAME is a
        list of tasks or rows, or a function that returns an iterator of them. Sources of the same name are labelled
        with their parameters as well.

        Args:
            eval_tasks: evaluation-only tasks, in the same form; see Mixture.eval_sets.
            kind: what the rows of files and of code are; see `Columns`.
            cache: folder for copies and indexes of files; by default the user's.

        Raises:
            ConfigError: `tasks` is empty, or a setting acts on none of them.
            TaskError: a data set, file or parameter is unknown, a source is given twice, or generated tasks, which
                have no pairs, are to be pairs.
        """
        if not tasks:
            raise ConfigError("no tasks are given", hint="set --tasks to at least one data set or file of tasks")
        specs = _parsed(tasks, "--tasks")
        # A flag without effect is refused: a user who sets it expects something that would not happen.
        self._check_effects([*specs, *_parsed(eval_tasks, "--eval-tasks")], has_eval_tasks=bool(eval_tasks))
        purpose = _Purpose(seed=seed, kind=kind, cache=cache, is_trained=True, is_evaluated=bool(eval_tasks))
        sources = self._sources(specs, purpose)
        held_apart = self.eval_sources(eval_tasks, seed=seed, kind=kind, cache=cache)
        return Mixture(
            sources,
            {name: spec.weight for name, spec in zip(sources, specs, strict=True)},
            evaluation=held_apart,
            holds_out=not eval_tasks or self.held_out_share is not None,
            overlap=self.overlap,
        )

    def _check_effects(self, specs: Sequence[FlagText], *, has_eval_tasks: bool) -> None:
        """Refuse settings that act on none of the tasks."""
        has_rows = any(not _is_generated(spec) for spec in specs)
        has_rendered_rows = any(not _is_generated(spec) and not _names_prompt(spec) for spec in specs)
        has_files = any(not _is_generated(spec) and not spec.is_code for spec in specs)
        idle = {
            "--data.template renders rows, and tasks are generated": bool(self.template) and not has_rows,
            "--data.template has no effect, as all --tasks name the column of the prompt": bool(self.template)
            and not has_rendered_rows,
            "--data.max-bad-rows is of files, and no tasks come from one": self.max_bad_rows > 0 and not has_files,
            "--data.overlap is of --eval-tasks, and there are none": self.overlap != "refuse" and not has_eval_tasks,
        }
        for message in (message for message, is_idle in idle.items() if is_idle):
            raise ConfigError(message, hint=f"leave out {message.split()[0]}")

    def eval_sources(
        self,
        tasks: Sequence[str],
        *,
        seed: int,
        kind: Kind = "prompt",
        flag: str = "--eval-tasks",
        cache: Path | None = None,
    ) -> dict[str, Source]:
        """Build evaluation-only sources by set name: all rows of files, and the held-out part of generated tasks.

        Args:
            flag: the flag with the texts, for errors.
            cache: see `build`.

        Raises:
            TaskError: as for `build`.
        """
        purpose = _Purpose(seed=seed, kind=kind, cache=cache, is_trained=False, is_evaluated=True)
        return self._sources(_parsed(tasks, flag), purpose)

    def _sources(self, specs: Sequence[FlagText], purpose: _Purpose) -> dict[str, Source]:
        names = [spec.title or _short_name(spec) for spec in specs]
        sources: dict[str, Source] = {}
        for spec, short in zip(specs, names, strict=True):
            # Sources of the same short name are told apart by their parameters.
            name = short if names.count(short) == 1 else _label(spec)
            if name in sources:
                raise TaskError(
                    f"the tasks {name!r} are given twice", hint="give them once, with the sum of the weights"
                )
            sources[name] = self._source(name, spec, purpose)
        return sources

    def _source(self, name: str, spec: FlagText, purpose: _Purpose) -> Source:
        if _is_generated(spec):
            if purpose.kind == "pair":
                raise spec.wrong(
                    "generated tasks have no preferred answers", "give a file with the columns prompt, chosen, rejected"
                )
            share = _GENERATED_SHARE if self.held_out_share is None else self.held_out_share
            instruction = _NUMBERS if self.instruction is None else self.instruction
            return ReasoningGymSource(spec.name, spec.params, purpose.seed, share, name, instruction, self.system)
        # With evaluation files of their own, training files need not give up rows.
        share = (0.0 if purpose.is_evaluated else _FILE_SHARE) if self.held_out_share is None else self.held_out_share
        if spec.is_code:
            items: Any = user_code.load(spec.name, spec.flag)
            return IterableSource(
                name, items, purpose.seed, share if purpose.is_trained else 1.0, self._columns(spec, purpose.kind)
            )
        return TableSource(
            name,
            _tables(spec, purpose.cache),
            self._columns(spec, purpose.kind),
            seed=purpose.seed,
            held_out_share=share if purpose.is_trained else 1.0,
            max_bad_rows=self.max_bad_rows,
        )

    def _columns(self, spec: FlagText, kind: Kind) -> Columns:
        # Keys other than columns depend on the kind of source: folders have splits, data sets of the hub also configs.
        extra_keys = () if spec.is_code else ("split",) if is_path(spec.name) else _HUB_KEYS
        columns = (*_COLUMNS, *(_PAIR if kind == "pair" else ()))
        known_keys = (*columns, *extra_keys)
        check_keys(spec, known_keys)
        named_columns = {key: spec.raw_params[key] for key in columns if key in spec.raw_params}
        if "question" in named_columns and "messages" in named_columns:
            raise spec.wrong("set both question and messages", "set one: either is the whole prompt", key="messages")
        template = "" if _names_prompt(spec) else self.template
        common = {"template": template, "system": self.system, "instruction": self.instruction or ""}
        # Keys of a source override --data for it: files of different forms may need different templates.
        return Columns(**{**common, **named_columns}, kind=kind)


def _parsed(texts: Sequence[str], flag: str) -> list[FlagText]:
    specs = [parse(text, flag, error=TaskError) for text in texts]
    for spec in specs:
        if spec.weight < 0:
            raise spec.wrong(f"the weight {spec.weight:g} is below 0", "write a weight such as *0.5", key="weight")
        for key, value in spec.raw_params.items():
            if not value:
                raise spec.wrong(f"{key} has no value", "write KEY=VALUE", key=key)
    return specs


def _label(spec: FlagText) -> str:
    """Return name and parameters, to distinguish specs of the same name."""
    params_text = ",".join(f"{key}={value}" for key, value in spec.raw_params.items())
    return f"{spec.name}:{params_text}" if params_text else spec.name


def _is_generated(spec: FlagText) -> bool:
    if spec.is_code or is_path(spec.name):
        return False
    # A data set takes precedence over a folder of the same name, which can be written ./name.
    return not is_hub_id(spec.name) and (not Path(spec.name).exists() or has_dataset(spec.name))


def _names_prompt(spec: FlagText) -> bool:
    return "question" in spec.raw_params or "messages" in spec.raw_params


def _tables(spec: FlagText, cache: Path | None) -> list[Table]:
    if is_path(spec.name) or not is_hub_id(spec.name):
        split = spec.raw_params.get("split", "")
        paths = find_files(spec.name, split=split)
        if split and not (Path(spec.name).expanduser() / "dataset_dict.json").is_file():
            raise spec.wrong(
                "split is for data sets on the hub, and for folders that save_to_disk wrote",
                f"name the files by a pattern, such as {_pattern(spec.name, split)}",
                key="split",
            )
        splits = {name for path in paths if (name := _split_of(path))}
        # As in a copy of a data set's repository: its tests would be trained on.
        if "train" in splits and len(splits) > 1:
            raise spec.wrong(
                f"the files are of several splits: {', '.join(sorted(splits))}",
                f"name one split's files by a pattern, such as {_pattern(spec.name, 'train')}",
            )
        return open_tables(paths, cache and cache / TABLES)
    return [hub.fetch(spec.name, **{key: spec.raw_params.get(key, "") for key in _HUB_KEYS})]


def _split_of(path: Path) -> str:
    """Return the split that a file's name begins with, or else its folder is named after; "" if there is none."""
    match = _SPLIT.match(path.name) or _SPLIT.fullmatch(path.parent.name)
    return match[1].lower() if match else ""


def _pattern(name: str, split: str) -> str:
    return f"{name.rstrip('/')}/**/{split}*" if Path(name).expanduser().is_dir() else f"{split}*"


def _short_name(spec: FlagText) -> str:
    """Return a short name for a source: the data set, the file without its suffix, or the folder."""
    if spec.is_code:
        return spec.name.rpartition(":")[2]
    if not is_path(spec.name):
        return spec.name
    path = Path(spec.name).expanduser()
    plain = path.name.partition(".")[0]
    # A pattern such as data/**/*.jsonl is named by its folder, since the file's name says nothing.
    folders = [part for part in path.parent.parts if part != path.anchor and not glob.has_magic(part)]
    return folders[-1] if glob.has_magic(plain) and folders else plain or path.name
