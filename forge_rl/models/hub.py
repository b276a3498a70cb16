"""Models on the Hugging Face hub: downloads by id and revision, and uploads."""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_rl.errors import ModelError
from forge_rl.models.bundled import BUNDLED
from forge_rl.models.cache import Progress
from forge_rl.models.hf_folder import MODEL_FILES, OTHER_FORMATS
from forge_rl.system.redaction import without_credentials
from forge_rl.system.terminal import visible

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

CARD = "README.md"
"""Model card that a run writes with each model that it exports."""
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
"""Hint where the hub does not know the user."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_REVISION = re.compile(r"[\w.-]+(/[\w.-]+)*")
_MAX_SHOWN = 300
"""Maximum length of an error of the hub's that is shown."""
_OTHERS = (OTHER_FORMATS, "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "*/*.tiktoken")
"""Files not to fetch: the same weights in other formats, many gigabytes. On the hub "*" also matches "/"."""


def is_hub_id(name: str) -> bool:
    """Return True if a name has the form of a hub id, such as openai/gsm8k."""
    return _ID.fullmatch(name) is not None


def is_hub_model(name: str) -> bool:
    """Return True if a name has the form of a hub id with or without a revision, such as Qwen/Qwen3-0.6B@main."""
    hub_id, separator, revision = name.partition("@")
    return is_hub_id(hub_id) and (not separator or _REVISION.fullmatch(revision) is not None)


def download(name: str, progress: Progress | None = None) -> Path:
    """Return a model's folder in the hub's own cache, downloading missing files.

        download("Qwen/Qwen3-0.6B@main")

    An interrupted download resumes where it ended. Without a network, or with HF_HUB_OFFLINE=1, a complete model in the
    cache is used without a request. Gated models need a token: HF_TOKEN, or `hf auth login`.

    Args:
        name: hub id, or hub id@revision: a branch, a tag or a commit.
        progress: called with the share that is there of the bytes of all files that have begun.

    Raises:
        ModelError: the hub does not give the model, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    hub_id, _, revision = name.partition("@")
    options: dict[str, Any] = {"allow_patterns": list(MODEL_FILES), "ignore_patterns": list(_OTHERS)}
    if revision:
        options["revision"] = revision
    if progress is not None:
        # The client reports progress to nothing but a progress bar.
        options["tqdm_class"] = _bars(name, progress)
    with _named_errors(f"cannot get {name!r} from the hub", f"or give a folder or a bundled model ({_bundled()})"):
        return Path(str(snapshot_download(hub_id, **options)))


def upload(folder: Path, files: Sequence[Path], repo: str, *, private: bool, message: str) -> str:
    """Upload files of a model's folder, creating the repository if needed; return the commit's address.

    Args:
        files: what to upload; nothing else of the folder leaves this machine, and no hidden file.
        repo: hub id.
        private: whether a new repository is private.
        message: of the commit.

    Raises:
        ModelError: the hub refuses it, or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _named_errors(f"cannot upload {folder} to {repo!r}", "`hf auth login` with a token that may write"):
        api.create_repo(repo, private=private, exist_ok=True)
        # By name: on the hub "*" also matches "/", and would take in whatever lies in folders of the model's.
        patterns = [glob.escape(path.relative_to(folder).as_posix()) for path in files]
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, allow_patterns=patterns, commit_message=message, ignore_patterns=[".*"]
        )
    return str(commit.commit_url)


@contextlib.contextmanager
def _named_errors(problem: str, way_out: str) -> Iterator[None]:
    """Re-raise the hub's errors as ModelError with cause and hint."""
    from httpx import HTTPError
    from huggingface_hub import errors

    try:
        yield
    # hf_xet, which fetches large files, raises plain RuntimeErrors.
    except (errors.HfHubHTTPError, errors.HFValidationError, HTTPError, OSError, RuntimeError) as error:
        # Without a cached copy, the client puts an error of its own in place of the hub's answer.
        answer = error.__cause__ if isinstance(error.__cause__, errors.HfHubHTTPError) else error
        # From the most specific class to the least: some are subclasses of others.
        match answer:
            case errors.GatedRepoError():
                cause, hint = "access to it is gated", f"request access on its page, {LOGIN}"
            case errors.RevisionNotFoundError():
                cause, hint = "it has no such revision", "name a branch, a tag or a commit after the @"
            case errors.RepositoryNotFoundError():
                cause, hint = "the model does not exist or is private", f"check the name, {LOGIN}"
            case errors.IncompleteSnapshotError():
                cause, hint = "the hub cannot be reached, and the cache has only a part of it", "check the network"
            case errors.HfHubHTTPError():
                cause, hint = refusal_of(answer)
            case errors.LocalEntryNotFoundError():
                cause, hint = "the hub cannot be reached, and the model is not in its cache", "check the network"
            case errors.OfflineModeIsEnabled():
                cause, hint = "HF_HUB_OFFLINE is set", "unset it"
            case HTTPError():
                cause, hint = "the hub cannot be reached", "check the network"
            case _:
                cause, hint = _first_line(str(error)) or type(error).__name__, "try again"
        raise ModelError(f"{problem}: {cause}", hint=f"{hint}, {way_out}") from error


def refusal_of(answer: HfHubHTTPError) -> tuple[str, str]:
    """Return the reason of a refusal by the hub, and a hint."""
    status = answer.response.status_code
    cause = f"the hub answers with status {status}: {_first_line(answer.server_message or str(answer))}"
    return cause, LOGIN if status in (401, 403) else "try again"


def _first_line(text: str) -> str:
    """Return the first line of an error's text that is not empty, in a form that is safe to print."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return visible(without_credentials(line.strip()[:_MAX_SHOWN]))


def _bundled() -> str:
    return ", ".join(BUNDLED)


def _bars(name: str, progress: Progress) -> type:
    """Return a class of progress bars for the hub's client; the one that counts bytes on disk reports to `progress`."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B" and "Reconstructing" in options.get("desc", "")
            super().__init__(*args, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            if self._counts_bytes and self.total:
                self.n += n or 0
                progress(f"downloading {name}", min(1.0, self.n / self.total))

    return Bar
