"""Data sets of the Hugging Face hub, through `datasets`, which keeps them as Arrow files in its own cache."""

from __future__ import annotations

import re
from pathlib import Path

from forge_rl.errors import TaskError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Tell an id such as openai/gsm8k."""
    return _HUB_ID.fullmatch(name) is not None


def fetch(name: str, *, config: str = "", split: str = "", revision: str = "") -> list[Path]:
    """Return the Arrow files of a data set, downloaded before or now. No code of the data set's is run.

    Raises:
        TaskError: there is no such data set, or it cannot be had.
    """
    import datasets
    from huggingface_hub import errors

    try:
        found = datasets.load_dataset(name, config or None, split=split or "train", revision=revision or None)
    except Exception as error:  # it wraps errors of a dozen libraries
        cause: BaseException | None = error
        names = []
        while cause is not None:
            names.append(cause)
            cause = cause.__cause__ or cause.__context__
        if any(isinstance(each, errors.GatedRepoError) for each in names):
            why, hint = "access to it is gated", "ask for access on its page, and log in with `hf auth login`"
        elif isinstance(error, datasets.exceptions.DatasetNotFoundError):
            why, hint = "there is no such data set, or it is private", "check the name, log in with `hf auth login`"
        elif isinstance(error, ConnectionError | OSError) and not isinstance(error, FileNotFoundError):
            why, hint = "the hub cannot be reached, and no copy is in its cache", "check the network, or name a file"
        else:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            hint = "say which part is meant: :config=NAME,split=NAME"
        raise TaskError(f"cannot get the data set {name!r} from the hub: {why}", hint=hint) from error
    return [Path(file["filename"]) for file in found.cache_files]
