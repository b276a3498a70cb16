"""Upload a model that a run trained to the Hugging Face hub.

forge-rl push runs/grpo-1a2b3c4d me/my-model
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from forge_rl.errors import ModelError
from forge_rl.models.adapters import BASE
from forge_rl.models.adapters import CONFIG as ADAPTER_CONFIG
from forge_rl.models.hf_folder import RECORD, read_object
from forge_rl.models.hub import CARD, is_hub_id, is_hub_model, upload
from forge_rl.models.resolve import check_files, find_trained
from forge_rl.run.launch import launch


@dataclass(frozen=True, kw_only=True)
class Config:
    """Upload a model or adapter with its tokenizer, model card and forge_rl.json; the token comes from HF_TOKEN or
    `hf auth login`."""

    run: tyro.conf.Positional[Path]
    """Folder of a run, of which the best checkpoint is taken, or else the newest; of a checkpoint, or of a model."""
    repo: tyro.conf.Positional[str]
    """Hub id to upload to, which is created if it does not exist."""
    private: bool = False
    """Create the repository so that nobody else can see it."""
    message: str = "Model trained with forge_rl"
    """Message of the commit."""


async def main(config: Config) -> None:
    """Upload the folder."""
    folder = find_trained(config.run)
    if not is_hub_id(config.repo):
        raise ModelError(f"{config.repo!r} is not a hub id", hint="give one as org/name")
    files = check_files(folder, CARD)
    print(f"uploading {folder} to {config.repo}", flush=True)
    with tempfile.TemporaryDirectory(prefix="push-") as work:
        place, files = with_named_base(folder, files, Path(work))
        url = await asyncio.to_thread(upload, place, files, config.repo, private=config.private, message=config.message)
    print(f"uploaded it: {url}")


def with_named_base(folder: Path, files: list[Path], work: Path) -> tuple[Path, list[Path]]:
    """Return an adapter's folder and files with its base named as on the hub, where others find it, and not by the
    folder that it has on this machine. Other models, and adapters of a base that is not on the hub, stay as they are.

    Args:
        work: empty folder for copies.

    Raises:
        ModelError: a file cannot be read.
    """
    if not {ADAPTER_CONFIG, RECORD} <= {path.name for path in files}:
        return folder, files
    name = str(read_object(folder / RECORD).get("base_model", ""))
    if not is_hub_model(name) or Path(name).is_dir():
        return folder, files
    hub_id, _, revision = name.partition("@")
    for path in files:
        copy = work / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    config = read_object(work / ADAPTER_CONFIG)
    base = Path(str(config.get("base_model_name_or_path")))
    if base.parent.name == "snapshots":  # of the hub's cache, by commit
        revision = base.name
    names = {"base_model_name_or_path": hub_id, **({"revision": revision} if revision else {})}
    (work / ADAPTER_CONFIG).write_text(json.dumps(config | names, indent=2) + "\n")
    if (work / BASE).is_file():
        (work / BASE).write_text(json.dumps(read_object(work / BASE) | {"folder": hub_id}, indent=2) + "\n")
    return work, [work / path.relative_to(folder) for path in files]


if __name__ == "__main__":
    launch(Config, main)
