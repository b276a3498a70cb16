"""Environment variables: which ones child processes get, and how the rest is hidden from other processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.system.redaction import is_secret, without_credentials

_PASSED = "FORGE_RL_PASS_ENV"
"""Variable with the names that the user has added, comma-separated."""
_OWN = "FORGE_RL_PRIVATE_NETWORK"
"""Variable of a single process, never passed to its children."""
_LISTED = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|PWD|HOSTNAME|LANG|LANGUAGE|TZ|TERM|TMPDIR|TEMP|TMP|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|LIBRARY_PATH|CPATH|CC|CXX|VIRTUAL_ENV|SSL_CERT_FILE|SSL_CERT_DIR|(REQUESTS|CURL|AWS)_CA_BUNDLE"
    r"|NODE_EXTRA_CA_CERTS|GLIBC_TUNABLES|MAX_JOBS"
    r"|(LC|XDG|CONDA|OMP|KMP|GOMP|MKL|DNNL|ONEDNN|OPENBLAS|NUMEXPR|NUMBA|MALLOC|TCMALLOC|PYTORCH|ATEN|TRITON|CUTE"
    r"|CUTLASS|DG|VLLM|NCCL|GLOO|UCX|FI|RDMAV|CUDA|CUDNN|CUBLAS|NVIDIA|NVTE|HIP|ROCR|HF|HUGGINGFACE|TRANSFORMERS"
    r"|TOKENIZERS|SAFETENSORS|DATASETS|MONARCH|HYPERACTOR|RUST|MUJOCO|PYOPENGL|SDL|FORGE_RL)_.*"
    r"|(PYTHON|TORCH|FLASH|JE_MALLOC).*)"
)
"""Variables that shells, Python, torch, vLLM, Monarch, NCCL, CUDA, caches and the C library read."""
_PR_SET_DUMPABLE = 4
_LEAST_SECRET = 8
"""Letters of a secret below which its value may be any word."""


def is_handed_on(name: str, value: str) -> bool:
    """Return True if child processes get this variable: listed and not a secret, or named by the user."""
    if name in os.environ.get(_PASSED, "").split(","):
        return True
    is_listed = _LISTED.fullmatch(name) is not None and name != _OWN
    return is_listed and not is_secret(name) and value == without_credentials(value)


def handed_on(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child process, with additional variables.

    Popen(command, env=handed_on({"OMP_NUM_THREADS": "1"}))
    """
    return {name: value for name, value in os.environ.items() if is_handed_on(name, value)} | dict(more or {})


def value_of(name: str) -> str:
    """Return the value of a variable of this process; "" if it is not set."""
    return os.environ.get(name, "")


def environment() -> dict[str, str]:
    """Return all variables of this process."""
    return dict(os.environ)


def kept_back() -> dict[str, str]:
    """Return the variables that are not passed to child processes."""
    return {name: value for name, value in os.environ.items() if not is_handed_on(name, value) and name != _OWN}


def without_secrets(text: str) -> str:
    """Replace the values of environment variables that look like secrets by asterisks, wherever a text quotes them."""
    for name, value in os.environ.items():
        if len(value) >= _LEAST_SECRET and is_secret(name):
            text = text.replace(value, "***")
    return text


def hand_on_too(names: Sequence[str]) -> None:
    """Pass additional variables of this process to its children, even secret ones.

    Raises:
        ConfigError: a variable is not set.
    """
    for name in names:
        if name not in os.environ:
            raise ConfigError(
                f"--pass-env names {name}, which is not set", hint="export it, or remove it from --pass-env"
            )
    passed_names = ",".join(dict.fromkeys([*filter(None, os.environ.get(_PASSED, "").split(",")), *names]))
    if passed_names != os.environ.get(_PASSED, ""):
        os.environ[_PASSED] = passed_names


def api_key(flag: str, variable: str, *, option: str = "api_key_env=") -> str:
    """Return the API key in an environment variable; "" if none is named.

    Args:
        flag: what needs the key, for errors.
        variable: the variable's name; "" for none.
        option: what sets the name, for errors: an option of the flag, such as api_key_env=, or a flag; "" for nothing.

    Raises:
        ConfigError: it is not the name of a variable, or the variable is not set, or cannot be sent in a header.
    """
    is_flag = option.startswith("--")
    if variable and not variable.isidentifier():  # it may be the key itself: never print it
        raise ConfigError(
            f"{flag}: {option.removesuffix('=')} is not the name of an environment variable",
            hint=f"put the key into a variable and pass its name, such as {option}{' ' * is_flag}OPENAI_API_KEY",
        )
    if variable and not os.environ.get(variable):
        hint = f"set it to the server's key, name another as {option}NAME, or write {option} if it needs none"
        if is_flag or not option:
            hint = "set it to the key" + f", or name another as {option} NAME" * is_flag
        raise ConfigError(f"{flag}: the environment variable {variable} is not set", hint=hint)
    key = os.environ.get(variable, "")
    # No header may have it, and HTTP clients' errors print the header.
    if key != key.strip() or not (key.isprintable() and key.isascii()):
        raise ConfigError(
            f"{flag}: the environment variable {variable} starts or ends with white space, or has a character that no "
            "header can carry",
            hint="set it to the key alone",
        )
    return key


def pop_key(flag: str, variable: str) -> str:
    """Return the API key in an environment variable, "" if it is not set, and remove the variable: processes that start
    later must not inherit it.

    Raises:
        ConfigError: no header can carry the key, so no request could match it.
    """
    key = api_key(flag, variable, option="") if os.environ.get(variable) else ""
    os.environ.pop(variable, None)
    return key


def hide() -> None:
    """Keep other processes of this user from reading this process's memory, and its secret variables in /proc.

    Root can still read the memory. Call this before other threads run, as libc's variables move.
    """
    with contextlib.suppress(OSError):
        # Fields 50 and 51: addresses of the initial environment, which /proc/PID/environ shows.
        start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
        address = start
        for entry in ctypes.string_at(start, end - start).split(b"\0") if start else ():
            name, _, value = entry.partition(b"=")
            # A value of asterisks has been hidden before.
            if value.strip(b"*") and not is_handed_on(os.fsdecode(name), os.fsdecode(value)):
                if os.environb.get(name) == value:
                    os.environb[name] = value  # makes libc copy it elsewhere
                ctypes.memset(address + len(name) + 1, ord("*"), len(value))
            address += len(entry) + 1
    _close_memory()


def take(secrets: Mapping[str, str]) -> None:
    """Add variables to this process's os.environ only; neither /proc nor child processes get them by default.

    Nor does libc, whose environment must not change while other threads run.
    """
    if secrets:
        _close_memory()
        # The mapping behind os.environ: assigning to os.environ itself would change libc's environment.
        mapping: dict[bytes, bytes] = getattr(os.environ, "_data")  # noqa: B009
        mapping.update({os.fsencode(name): os.fsencode(value) for name, value in secrets.items()})


def set_here(environment: Mapping[str, str]) -> None:
    """Set environment variables of this process, and so of its children, except for those that are unchanged.

    Not for a process whose other threads read its environment all the time: libc could crash.
    """
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@functools.cache
def _close_memory() -> None:
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_DUMPABLE, 0)
    # Forked processes that outlive this one are found by the mark in their environment.
    os.register_at_fork(after_in_child=lambda: prctl(_PR_SET_DUMPABLE, 1))
