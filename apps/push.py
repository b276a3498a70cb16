"""Upload a model that a run trained to the Hugging Face hub.

forge-rl push runs/grpo-1a2b3c4d me/my-model
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import tyro

from forge_rl.errors import ModelError
from forge_rl.models.adapters import CONFIG as ADAPTER_CONFIG
from forge_rl.models.hub import CARD, is_hub_id, upload
from forge_rl.models.resolve import check_files, checkpoints_in, model_in
from forge_rl.run.launch import launch


@dataclass(frozen=True, kw_only=True)
class Config:
    """Upload a model or adapter with its tokenizer, model card and forge_rl.json; the token is HF_TOKEN's, or that of
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
        raise ModelError(f"{config.repo!r} is no hub id", hint="give one as org/name")
    files = check_files(folder, CARD)
    print(f"uploading {folder} to {config.repo}", flush=True)
    url = await asyncio.to_thread(upload, folder, files, config.repo, private=config.private, message=config.message)
    print(f"uploaded it: {url}")


def find_trained(run: Path) -> Path:
    """Return the folder of the model that a run, a checkpoint or a folder stands for.

    Raises:
        ModelError: there is none.
    """
    best = run / "checkpoints" / "best"
    steps = checkpoints_in(run / "checkpoints")
    place = best if best.is_dir() else steps[max(steps)] if steps else run
    folder = model_in(place).resolve()
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ModelError(
            f"{run} holds no model", hint="name a run that has saved one, a checkpoint or a model's folder"
        )
    return folder


if __name__ == "__main__":
    launch(Config, main)
