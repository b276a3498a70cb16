"""The models that a run began with, by `--model` and other flags: a resumed run keeps them, or refuses others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from forge_rl.errors import ConfigError, ModelError
from forge_rl.models.adapters import is_adapter
from forge_rl.models.digests import model_digests
from forge_rl.models.hf_folder import corrected_tokenizer_config
from forge_rl.models.hub import download, is_hub_model
from forge_rl.models.resolve import model_in
from forge_rl.run.records.json_files import read_object, write_json
from forge_rl.system.folders import is_there

MODELS = "models.json"
"""File of a run folder with the models that the run began with."""


@dataclass(frozen=True)
class ModelRecord:
    """A model that a run began with."""

    name: str
    """Value of the flag: a folder, a hub id or a bundled model."""
    folder: str
    """Folder that the value led to, with links resolved; for a hub id, the folder of a revision."""
    files: dict[str, str]
    """Digest of each file."""


def read_records(run: Path) -> dict[str, ModelRecord]:
    """Return the models that a run began with, by flag; none for a run without a record.

    Raises:
        ConfigError: the record cannot be read.
    """
    path = run / MODELS
    if not is_there(path):
        return {}
    records: dict[str, ModelRecord] = {}
    for flag, record in read_object(path).items():
        match record:
            case {"name": str(name), "folder": str(folder), "files": dict(files)}:
                records[flag] = ModelRecord(name, folder, files)
            case _:
                raise ConfigError(f"{path} is malformed at {flag!r:.80}", hint="choose another --out")
    return records


def record_model(run: Path, flag: str, name: str, folder: Path) -> None:
    """Record in a run's folder which model a flag led to."""
    records = read_records(run) | {flag: ModelRecord(name, str(folder), model_digests(folder))}
    write_json(run / MODELS, {key: asdict(record) for key, record in records.items()})


def where_moved(flag: str, record: ModelRecord) -> str:
    """Describe how the model that a flag leads to changed since the run began; "" if it did not, or is not a folder."""
    folder = Path(record.name).expanduser()
    if not folder.is_dir():
        return ""
    folder = model_in(folder).resolve()
    # The record is of the merged model, or of the one with a corrected tokenizer, which ModelKeeper compares.
    if is_adapter(folder) or corrected_tokenizer_config(folder) is not None:
        return ""
    if not (changed := _changed(record, folder)):
        return ""
    before = f"led to {record.folder}" if str(folder) != record.folder else "had other files"
    return f"{flag} {record.name} leads to {folder} and {before} when the run began: {changed}"


@dataclass(frozen=True, kw_only=True)
class ModelKeeper:
    """Holds a run to the models that it began with."""

    run: Path
    """Folder of the run."""
    resumes: bool
    """Whether the run resumes from a checkpoint; otherwise its models are recorded."""
    force: bool
    """Whether to accept a model that changed, as with --force-continue."""
    tell: Callable[[str], None]
    """Called with a line about each model that is not the original one, or not the one that its flag now names."""

    def keep(self, flag: str, name: str, folder: Path, *, weights: bool) -> Path:
        """Return the model folder to use for a flag that now names `folder`: the one that the run began with, if its
        files are unchanged.

        Args:
            weights: whether a resumed run uses the weights, as a frozen reference or a teacher, or only the other
                files.

        Raises:
            ConfigError: the run began with another model, which no longer exists.
        """
        record = read_records(self.run).get(flag) if self.resumes else None
        # Another value of the flag is a change of settings, which `check_same` has accepted or refused by now.
        if record is None or record.name != name:
            record_model(self.run, flag, name, folder)
            return folder
        if not (changed := _changed(record, folder, weights=weights)):
            return folder
        # The flag leads elsewhere, as when a link such as checkpoints/best has moved: use the folder that it led to, if
        # its files are as they were.
        original = _original(record)
        if original != folder and original.is_dir() and not _changed(record, original, weights=weights):
            self.tell(f"{flag} {name} leads to {folder} now; the run keeps {original}, which it began with")
            return original
        if not self.force:
            raise ConfigError(
                f"{flag} {name} is not the model that this run began with, {original}: {changed}",
                hint="put that model back, choose another --out for a new run, or continue with the new one: "
                "--force-continue",
            )
        self.tell(f"{flag} {name} is another model than the run began with: {changed}")
        record_model(self.run, flag, name, folder)
        return folder


def _original(record: ModelRecord) -> Path:
    """Return the folder that a run began with. For a model on the hub it is the folder of a commit, which is downloaded
    again if the cache lacks it, as on another machine."""
    folder, hub_id = Path(record.folder), record.name.partition("@")[0]
    if is_hub_model(record.name) and folder.parent.name == "snapshots" and not folder.is_dir():
        with contextlib.suppress(ModelError):  # the caller says what is missing
            return download(f"{hub_id}@{folder.name}").resolve()
    return folder


def _changed(record: ModelRecord, folder: Path, *, weights: bool = True) -> str:
    """Name the files of a folder that differ from a record's, "" if none does."""
    digests = model_digests(folder)
    all_names = digests.keys() | record.files.keys()
    names = sorted(name for name in all_names if digests.get(name) != record.files.get(name))
    # A policy's weights come from the checkpoint; the tokenizer and the config still come from the model.
    names = [name for name in names if weights or ".safetensors" not in name]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more + (" changed" if names else "")
