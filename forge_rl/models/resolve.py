"""Resolves a model's name to its folder: bundled, local, or from the Hugging Face hub."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_rl.errors import ModelError
from forge_rl.models.adapters import CONFIG as ADAPTER_CONFIG
from forge_rl.models.adapters import Adapter, is_adapter, merged_copy
from forge_rl.models.bundled import BUNDLED, bundled_model
from forge_rl.models.cache import Progress, build_once
from forge_rl.models.dequantized import dequantized
from forge_rl.models.hf_folder import OTHER_FORMATS, TOKENIZERS, corrected_tokenizer_config, model_files, read_object
from forge_rl.models.hub import download, is_hub_model
from forge_rl.models.quantized import refusal

_INDEX = "model.safetensors.index.json"
_OBJECTS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", _INDEX),
)
"""Files that must hold a JSON object, if they exist."""
_AGAIN = "download or export the model again"
_CHECKPOINT = re.compile(r"step-(\d{6,})")


def resolve_model(name: str, cache: Path, progress: Progress | None = None) -> Path:
    """Return the folder with a model's config.json, safetensors and tokenizer.

        folder = resolve_model("Qwen/Qwen3-0.6B", default_cache())

    An adapter in PEFT's format is merged with its base model, once, into the cache. Where a tokenizer's class has to be
    corrected, the result is a folder of links.

    Args:
        name: bundled model, hub id of a model or an adapter with or without @revision, or folder of a model, an adapter
            or a checkpoint. Downloads are kept in the hub's own cache.
        cache, progress: as for bundled_model.

    Raises:
        ModelError: no such model exists, or its files are missing, broken, or links out of its folder.
    """
    if name in BUNDLED:
        # Before folders: a bundled name never means a folder in the working directory.
        return bundled_model(cache, progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        # A run has several models: which one is meant must be said.
        if newest := _newest_checkpoint(folder):
            raise ModelError(f"{folder} is a run, not a model", hint=f"name one of its checkpoints, such as {newest}")
        return _usable(model_in(folder), cache, progress)
    if is_hub_model(name):
        return _usable(download(name, progress), cache, progress)
    if "/" in name:
        raise ModelError(f"no such folder: {name}", hint='give an existing folder, or a hub id "org/name"')
    close = difflib.get_close_matches(name.lower(), BUNDLED, n=1, cutoff=0.4)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    raise ModelError(
        f"no model named {name!r}",
        hint=f'{suggestion}give a bundled model ({", ".join(BUNDLED)}), a folder, or a hub id "org/name"',
    )


def _usable(folder: Path, cache: Path, progress: Progress | None) -> Path:
    """Return a folder of the model that all programs read alike: merged, if it is an adapter, with the class that its
    tokenizer.json needs, and with weights in one format."""
    if is_adapter(folder):
        return _merged(folder, cache, progress)
    if _is_linked(folder, cache):
        return folder
    _checked(folder)
    config = corrected_tokenizer_config(folder)
    # vLLM reads all weights of a folder without an index.
    has_other_weights = not (folder / _INDEX).exists() and any(folder.glob(f"{OTHER_FORMATS}.safetensors"))
    return folder if config is None and not has_other_weights else _linked(folder, config, cache)


def _linked(folder: Path, tokenizer_config: str | None, cache: Path) -> Path:
    """Return a cached folder of links to the files of a model that are used, with another tokenizer_config.json if one
    is given."""
    paths = {path.relative_to(folder): path.resolve() for path in model_files(folder)}
    parts = [tokenizer_config or "", *(f"{name} {path}" for name, path in paths.items())]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    # The last two names stay: those of the hub's cache are "snapshots" and the commit.
    target = cache / f"linked-{key}" / folder.resolve().parent.name / folder.resolve().name

    def write(work: Path) -> None:
        for name, path in paths.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            if name.name == "tokenizer_config.json" and tokenizer_config is not None:
                (work / name).write_text(tokenizer_config)
            else:
                (work / name).symlink_to(path)

    try:
        build_once(target, write, ModelError)
    except OSError as error:
        raise ModelError(
            f"cannot link the files of {folder} in {target}: {error.strerror or error}",
            hint="choose another folder with --cache",
        ) from error
    return target


def _is_linked(folder: Path, cache: Path) -> bool:
    """Return True for a folder that `_linked` has made, such as the base of an adapter: its links lead out of it."""
    parents = folder.resolve().parents[1:3]
    return len(parents) == 2 and parents[0].name.startswith("linked-") and parents[1] == cache.expanduser().resolve()


def find_model(name: str, cache: Path) -> Path:
    """Return the folder of a model that is only read once: like `resolve_model`, but also takes a run, for its newest
    checkpoint.

    Raises:
        ModelError: as `resolve_model`, or the run has no checkpoint.
    """
    run = Path(name).expanduser()
    newest = None if name in BUNDLED or not run.is_dir() else _newest_checkpoint(run)
    return resolve_model(str(newest or name), cache).resolve()


def find_trained(run: Path) -> Path:
    """Return the folder of a run's model or adapter: the best checkpoint's, or else the newest's. Also takes a
    checkpoint, or a model's folder.

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


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a run's checkpoints folder by step, oldest first.

    Raises:
        OSError: the folder exists and cannot be read.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    steps = {int(match[1]): folder / name for name in names if (match := _CHECKPOINT.fullmatch(name))}
    return dict(sorted(steps.items()))


def model_in(folder: Path) -> Path:
    """Return the folder of a checkpoint's model; any other folder unchanged."""
    names = ("config.json", ADAPTER_CONFIG)
    is_checkpoint = any((folder / "model" / name).is_file() for name in names) and not any(
        (folder / name).exists() for name in names
    )
    return folder / "model" if is_checkpoint else folder


def _newest_checkpoint(run: Path) -> Path | None:
    """Return a run's newest checkpoint; None if the folder is not a run's.

    Raises:
        ModelError: the run has no checkpoint.
    """
    # Weights make it a model, whatever else lies there.
    if any(run.glob("*.safetensors")):
        return None
    try:
        steps = checkpoints_in(run) | checkpoints_in(run / "checkpoints")
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}", hint="try again") from error
    if steps:
        return steps[max(steps)]
    if (run / "checkpoints").is_dir() or (run / "metrics.jsonl").is_file():
        raise ModelError(f"{run} is a run without a checkpoint", hint="name a run that has saved one, or a model")
    return None


def _checked(folder: Path) -> Path:
    """Validate a folder before loading anything from it: it may be incomplete, broken or malicious."""
    files = check_files(folder)
    objects = {path.name: read_object(path) for path in files if path.name in _OBJECTS}
    missing = [] if "config.json" in objects else ["config.json"]
    weights = [path.name for path in files if path.suffix == ".safetensors"]
    if _INDEX in objects:
        weights = _parts(folder / _INDEX, objects[_INDEX])
        missing += [part for part in weights if not (folder / part).is_file()]
    elif not weights:
        missing.append("weights (*.safetensors)")
    if not any((folder / tokenizer).is_file() for tokenizer in TOKENIZERS):
        missing.append(f"a tokenizer ({' or '.join(TOKENIZERS)})")
    if missing:
        more = f" and {len(missing) - 3} more files" if len(missing) > 3 else ""
        raise ModelError(
            f"{folder} is not a complete model: it lacks {', '.join(missing[:3])}{more}", hint=_completion(folder)
        )
    # Headers only: a truncated download shows there, without reading gigabytes.
    for part in weights:
        _check_header(folder / part)
    return folder


def _merged(folder: Path, cache: Path, progress: Progress | None) -> Path:
    """Return the full model that results from an adapter and the base that it names."""
    check_files(folder)
    return merged_copy(folder, base_of(folder, "", cache, progress), cache)


def base_of(folder: Path, name: str, cache: Path, progress: Progress | None = None) -> Path:
    """Return the folder of an adapter's base model; of quantised weights, their copy in bfloat16.

    Args:
        name: the base model; "" for the one that the adapter names.

    Raises:
        ModelError: it does not exist, or is an adapter itself.
    """
    adapter = Adapter.read(folder)
    base = name or adapter.base
    if not base:
        raise ModelError(f"{folder} names no base model", hint="name it: forge-rl merge ADAPTER OUT --base FOLDER")
    place = Path(base).expanduser()
    if place.is_dir() and is_adapter(model_in(place)):
        raise ModelError(f"{folder} adapts {base}, an adapter itself", hint="merge that one first: forge-rl merge")
    # The adapter belongs to that revision's weights; a folder has none.
    if not name and adapter.revision and is_hub_model(base) and not place.is_dir():
        base = f"{base}@{adapter.revision}"
    try:
        model = resolve_model(base, cache, progress)
        config = read_object(model / "config.json")
        # An adapter is trained on that copy, and its cache may be emptied. `Adapter.merge` names other formats.
        is_readable = not refusal(config.get("quantization_config"), str(config.get("model_type")))
        return dequantized(model, cache, progress) if config.get("quantization_config") and is_readable else model
    except ModelError as error:
        raise ModelError(
            f"the base model of {folder} is not usable: {error.message}",
            hint="name another one: forge-rl merge ADAPTER OUT --base FOLDER",
        ) from error


def check_files(folder: Path, *extra_names: str) -> list[Path]:
    """Return the files of a folder that are used.

    Args:
        extra_names: names of files that no model needs, if they are there.

    Raises:
        ModelError: one is a link out of the folder, or might be of another user.
    """
    files = [*model_files(folder), *(folder / name for name in extra_names if (folder / name).is_file())]
    _check_links(folder, files)
    _check_owners(folder, files)
    return files


def _completion(folder: Path) -> str:
    """Say how to turn a folder into a complete model."""
    if pickle_names := sorted(path.name for path in folder.glob("*.bin") if path.name.startswith("pytorch_model")):
        return f"{pickle_names[0]} is a pickle, which is never loaded: load it in transformers and call save_pretrained"
    if ranks := [*folder.glob("*.tiktoken"), *folder.glob("tiktoken.model")]:
        return f"{ranks[0].name} needs Python code of the model, which is never run: convert it to tokenizer.json"
    if snapshots := sorted((folder / "snapshots").glob("*")):
        return f"name one of its snapshots, such as {snapshots[-1]}, or the hub id"
    inner_configs = sorted([*folder.glob("*/config.json"), *folder.glob(f"*/{ADAPTER_CONFIG}")])
    if inner_configs and not (folder / "config.json").exists():
        return f"name a model's folder in it, such as {inner_configs[-1].parent}"
    if folder.parent.name == "snapshots":
        return "its download was cut short, or the repository lacks them: start again with a network"
    return "give a folder to which save_pretrained wrote both the model and its tokenizer"


def _check_links(folder: Path, files: Sequence[Path]) -> None:
    """Check that no link leads out of the folder; the hub's cache links to files next to its snapshots, or next to all
    of its repositories."""
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        # snapshots/COMMIT/FILE is a link to blobs/HASH, which may be a link into the store of the whole cache.
        repository = homes[0].parent.parent
        homes = [repository, *([repository.parent / "blobs"] if repository.name.startswith("models--") else [])]
    for path in files:
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(home) for home in homes):
            raise ModelError(
                f"{path} links out of the model's folder, to {target}", hint=f"copy it: cp -rL {folder} COPY"
            )


def _check_owners(folder: Path, files: Sequence[Path]) -> None:
    """Check that all files belong to the folder's owner, this user or root, and are not world-writable."""
    top = folder.stat()
    owners = {top.st_uid, os.geteuid(), 0}
    for path in (folder, *files):
        with contextlib.suppress(FileNotFoundError):  # a dangling link is reported as missing
            status, problem = path.stat(), ""
            if status.st_uid not in owners:
                problem = f"{path} belongs to user {status.st_uid}, but the folder to user {top.st_uid}"
            # World-writable files are out of reach if others cannot enter the folder.
            elif status.st_mode & stat.S_IWOTH and top.st_mode & stat.S_IXOTH:
                problem = f"{path} is world-writable (mode {stat.S_IMODE(status.st_mode):o})"
            elif path != folder and not stat.S_ISREG(status.st_mode):
                problem = f"{path} is not a regular file"
            if problem:
                raise ModelError(
                    f"{folder} cannot be trusted: {problem}",
                    hint=f"if you trust its contents: chown -R and chmod -R o-w, or copy it: cp -rL {folder} COPY",
                )


def _parts(path: Path, index: Mapping[str, object]) -> list[str]:
    """List the files that an index names, which must be in its folder."""
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelError(f"{path} lists no weights", hint=_AGAIN)
    for name in files.values():
        # An index could name files anywhere on this machine.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{path} names {name!r:.80}, not a safetensors file in the same folder", hint=_AGAIN)
    return sorted(set(files.values()))


def _check_header(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint=_AGAIN) from error
