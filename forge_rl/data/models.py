"""Finds the folder of a model by its name: bundled, local, or on the Hugging Face hub."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

from forge_rl.data.bundled import BUNDLED, Progress, bundled_model
from forge_rl.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files fetched from the hub: weights as safetensors only, configs, tokenizer and chat template."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def resolve_model(name: str, cache: Path, progress: Progress | None = None) -> Path:
    """Return the folder with a model's config.json, safetensors and tokenizer.

        folder = resolve_model("Qwen/Qwen3-0.6B", default_cache())

    Args:
        name: name of a bundled model, a local folder, or a hub id. Downloads are kept in the hub's own cache.
        cache, progress: as for bundled_model.

    Raises:
        ModelError: there is no model of that name, or the named files are missing.
    """
    if name in BUNDLED:
        return bundled_model(cache, progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder)
    if _HUB_ID.fullmatch(name):
        return _checked(_download(name))
    if "/" in name:
        raise ModelError(f"no such folder: {name}", hint='name a folder that exists, or a hub id "org/name"')
    close = difflib.get_close_matches(name.lower(), BUNDLED, n=1, cutoff=0.4)
    meant = f"did you mean {close[0]!r}? " if close else ""
    raise ModelError(
        f"no model named {name!r}",
        hint=f'{meant}bundled: {", ".join(BUNDLED)}; otherwise name a folder, or a hub id "org/name"',
    )


def _checked(folder: Path) -> Path:
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing += [part for part in parts if not (folder / part).is_file()]
    elif not any(folder.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    if not any((folder / tokenizer).is_file() for tokenizer in _TOKENIZERS):
        missing.append(f"a tokenizer ({' or '.join(_TOKENIZERS)})")
    if missing:
        raise ModelError(
            f"{folder} is not a complete model: it lacks {', '.join(missing)}",
            hint="name a folder that save_pretrained wrote for both the model and its tokenizer",
        )
    return folder


def _download(hub_id: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_FILES)))
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        match error:
            case errors.GatedRepoError():
                cause, hint = "access to it is gated", "ask for access on its page, log in with `hf auth login`"
            case errors.RepositoryNotFoundError():
                cause, hint = "there is no such model, or it is private", "check the name, log in with `hf auth login`"
            case errors.LocalEntryNotFoundError():
                cause, hint = "the hub cannot be reached, and no copy is in its cache", "check the network"
            case _:
                cause, hint = (str(error).splitlines() or [type(error).__name__])[0], "try again"
        raise ModelError(
            f"cannot get {hub_id!r} from the hub: {cause}",
            hint=f"{hint}, or name a folder or a bundled model ({', '.join(BUNDLED)})",
        ) from error
