"""Data sets of the Hugging Face hub, through `datasets`, which caches them as Arrow files."""

from __future__ import annotations

from pathlib import Path

from forge_rl.data.sources.columnar import Arrow
from forge_rl.errors import TaskError
from forge_rl.models.hub import refusal_of


def fetch(name: str, *, config: str = "", split: str = "", revision: str = "") -> Arrow:
    """Return a data set's rows, mapped into memory, downloading it if needed. Runs no code from the data set.

    Raises:
        TaskError: the data set does not exist or cannot be fetched.
    """
    import datasets
    from huggingface_hub import errors

    try:
        dataset = datasets.load_dataset(
            name, config or None, split=split or "train", revision=revision or None, keep_in_memory=False
        )
    except Exception as error:  # `datasets` lets errors of a dozen libraries through
        cause: BaseException | None = error
        chain = []
        # The gate's error may be wrapped several times, so the whole chain is searched.
        while cause is not None:
            chain.append(cause)
            cause = cause.__cause__ or cause.__context__
        # An answer of the hub's is an OSError too, as is a network that fails.
        answer = next((link for link in chain if isinstance(link, errors.HfHubHTTPError)), None)
        if any(isinstance(link, errors.GatedRepoError) for link in chain):
            reason, hint = "access to it is gated", "request access on its page, and log in with `hf auth login`"
        elif isinstance(error, datasets.exceptions.DatasetNotFoundError):
            reason, hint = "the data set does not exist or is private", "check the name, log in with `hf auth login`"
        elif answer is not None:
            reason, hint = refusal_of(answer)
        elif isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            reason, hint = (
                "the hub cannot be reached, and the data set is not cached",
                "check the network, or give a file",
            )
        else:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            hint = "choose a part of the data set with :config=NAME,split=NAME"
        raise TaskError(f"cannot get the data set {name!r} from the hub: {reason}", hint=hint) from error
    if not dataset.cache_files:
        raise TaskError(f"the data set {name!r} has no rows", hint="choose another :config=NAME,split=NAME")
    return Arrow(Path(dataset.cache_files[0]["filename"]), dataset.data.to_batches())
