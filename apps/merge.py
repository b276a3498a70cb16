"""Merge an adapter with its base model into a full model folder.

forge-rl merge runs/grpo-1a2b3c4d/checkpoints/step-000010 my_model
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from forge_rl.errors import ModelError
from forge_rl.models.adapters import Adapter, is_adapter
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import base_of, check_files, find_trained
from forge_rl.run.launch import launch
from forge_rl.tokens.stops import name_added_stop


@dataclass(frozen=True, kw_only=True)
class Config:
    """Merge an adapter with its base model: W + scale B A, computed in float32 and rounded once to W's dtype."""

    adapter: tyro.conf.Positional[Path]
    """Folder of an adapter in PEFT's format, or of a run with --lora.rank, of which the best checkpoint is taken, or
    else the newest; or of a checkpoint."""
    out: tyro.conf.Positional[Path]
    """Folder to write, which must not exist."""
    base: str = ""
    """The base model: a bundled model, Hugging Face id or folder. By default the one that the adapter names, which must
    be unchanged. Quantised weights are merged with in bfloat16."""
    cache: Path = field(default_factory=default_cache)
    """Folder into which the bundled model is unpacked and quantised weights are converted, once."""


async def main(config: Config) -> None:
    """Write the folder."""
    base = await asyncio.to_thread(merge, config)
    print(f"wrote {config.out}: {find_trained(config.adapter)} merged into {base}")


def merge(config: Config) -> Path:
    """Write the merged model; return the folder of the base model.

    Raises:
        ModelError: the adapter cannot be read, its base model changed, or the folder exists or cannot be written.
    """
    folder, out = find_trained(config.adapter), config.out
    if not is_adapter(folder):
        raise ModelError(f"{folder} holds no adapter in PEFT's format", hint="name a folder with adapter_config.json")
    if out.exists():
        raise ModelError(f"{out} exists", hint="choose another folder")
    check_files(folder)
    adapter = Adapter.read(folder)
    base = base_of(folder, config.base, config.cache)
    if not config.base:
        adapter.check_base(base)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Next to the target and renamed when whole: on one file system the rename is atomic, and a failure leaves
        # nothing.
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as place:
            work = Path(place, out.name)
            work.mkdir()
            adapter.merge(base, work)
            name_added_stop(work, work)
            os.rename(work, out)
    except OSError as error:
        raise ModelError(
            f"{out} cannot be written: {error.strerror or error}",
            hint=f"free space ({_free_bytes(out) / 1e9:.1f} GB are free), or choose another folder",
        ) from error
    return base


def _free_bytes(out: Path) -> int:
    """Return the free space where a folder is to be, whose parents may be missing."""
    place = next(place for place in out.absolute().parents if place.is_dir())
    return shutil.disk_usage(place).free


if __name__ == "__main__":
    launch(Config, main)
