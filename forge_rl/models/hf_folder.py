"""Completes a Hugging Face folder whose files of weights are written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_INDEX = "model.safetensors.index.json"


def complete_folder(source: Path, target: Path, *, dtype: str, placed: Mapping[str, str], total_bytes: int) -> None:
    """Copy config and tokenizer of another folder with the same model, and write an index of several files.

    Args:
        dtype: dtype of the weights, such as "bfloat16", unquantised.
        placed: name of the file that holds each weight.
        total_bytes: bytes of all weights.
    """
    for path in source.iterdir():
        if path.is_file() and path.suffix in _COPIED and path.name != _INDEX:
            shutil.copy(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    for stale in ("torch_dtype", "quantization_config"):
        config.pop(stale, None)
    (target / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
    if len(set(placed.values())) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": placed}
        (target / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
