"""Files written with each exported model: a model card, and a record of the run that trained it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_rl.models.hf_folder import RECORD
from forge_rl.models.hub import CARD, is_hub_model
from forge_rl.run.records.json_files import read_object, write_json
from forge_rl.system.folders import write_whole
from forge_rl.system.variables import without_secrets

_SOURCES = "config.json", "versions.json"
_PRIVATE = ("cache", "out")
"""Flags that only name places on this machine."""


def write_card(model: Path, run: Path, *, step: int, scores: Mapping[int, float]) -> None:
    """Write README.md and forge_rl.json into an exported model's folder.

    Args:
        model: the exported model.
        run: the run's folder, with config.json and versions.json.
        step: number of the last step that trained the model.
        scores: scores of evaluations, by step.

    Raises:
        OSError: the folder cannot be written.
    """
    flags, versions = (read_object(run / name) if (run / name).is_file() else {} for name in _SOURCES)
    flags = {name: value for name, value in flags.items() if name not in _PRIVATE}
    # Later steps run while the checkpoint is written: their scores are not this model's.
    record = _public(
        {
            "step": step,
            "scores": {str(number): score for number, score in sorted(scores.items()) if number <= step},
            "base_model": flags.get("model", ""),
            "data": {name: flags[name] for name in ("tasks", "data", "rewards", "env") if flags.get(name)},
            "flags": flags,
            "versions": versions,
        }
    )
    write_json(model / RECORD, record)
    write_whole(model / CARD, _card(record))


def _public(value: Any) -> Any:
    """Return a value without secrets of the environment, such as a key in a server's command line: the model may be
    uploaded."""
    if isinstance(value, Mapping):
        return {name: _public(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_public(part) for part in value]
    return without_secrets(value) if isinstance(value, str) else value


def _card(record: Mapping[str, Any]) -> str:
    """Return a model card: metadata as the hub reads it, and how the model was trained."""
    base = str(record["base_model"])
    hub_id = base.partition("@")[0]
    metadata = [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [forge_rl, reinforcement-learning]",
    ]
    if is_hub_model(base):
        metadata.append(f"base_model: {json.dumps(hub_id)}")
    name = hub_id if is_hub_model(base) else Path(base).name
    lines = ["---", *metadata, "---", "", f"# {_plain(name) or 'A model'}, trained with forge_rl", ""]
    lines += [f"Trained for {record['step']} steps. `{RECORD}` has all flags, versions and scores.", ""]
    for title, values in record["data"].items():
        texts = [_plain(value if isinstance(value, str) else json.dumps(value)) for value in _listed(values)]
        lines.append(f"- {title}: {', '.join(f'`{text}`' for text in texts)}")
    if record["scores"]:
        lines += ["", "| step | score |", "|---|---|"]
        lines += [f"| {step} | {score:.4g} |" for step, score in record["scores"].items()]
    versions = {name: version for name, version in record["versions"].items() if isinstance(version, str)}
    if versions:
        lines += ["", ", ".join(f"{name} {_plain(version)}" for name, version in versions.items())]
    return "\n".join([*lines, ""])


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _plain(text: str) -> str:
    """Return a text of one line, without what Markdown would take for markup."""
    return re.sub(r"[`\x00-\x1f|<>\[\]]", " ", text)
