"""Loads a user's functions and classes by the text that names them in a flag."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType

from forge_rl.errors import ConfigError


def load(text: str, flag: str) -> object:
    """Return the object that `MODULE:NAME` or `FILE.py:NAME` names.

        score = load("mine.py:score", "--reward")

    A file is run again whenever it has changed, and its definitions are pickled by value for other processes. Its
    folder is added to the module search path.

    Args:
        flag: the flag with this value, for errors.

    Raises:
        ConfigError: the module, file or name does not exist, or importing it fails.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{flag} {text}: no name", hint=f"write {flag} MODULE:NAME or {flag} FILE.py:NAME")
    module = _of_file(Path(place), flag) if place.endswith(".py") else _of_name(place, flag)
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        defined_names = [
            attribute
            for attribute, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        ]
        raise ConfigError(
            f"{flag} {text}: {place} has no {name}", hint=f"it defines {', '.join(defined_names) or 'nothing'}"
        ) from None


def code_files(text: str) -> tuple[Path, ...]:
    """Return the file of `FILE.py:NAME`, or of `MODULE:NAME` in the working directory, without importing it; nothing if
    that file does not exist.

    code_files("agents.mine:solve")  # (Path("agents/mine.py"),)
    """
    place = text.rpartition(":")[0]
    path = place if place.endswith(".py") else f"{place.replace('.', '/')}.py"
    return (Path(path),) if os.path.isfile(path) else ()


def send_modules() -> None:
    """Pickle the user's imported modules by value from now on, for processes that do not see their files.

    The user's are all modules in Python source outside of Python's library, installed packages and this package.
    """
    import cloudpickle  # type: ignore[import-untyped]

    library_prefixes = _not_users()

    def installed(file: str) -> bool:
        return file.startswith(library_prefixes) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)

    for name, module in list(sys.modules.items()):
        # A package's modules may have files elsewhere, as those that torch writes.
        file, top = (
            getattr(owner, "__file__", None) or "" for owner in (module, sys.modules.get(name.partition(".")[0]))
        )
        if (
            file.startswith("/")
            and file.endswith(".py")
            and name != "__main__"
            and not (installed(file) or installed(top))
        ):
            with contextlib.suppress(ValueError):  # it is known under another name
                cloudpickle.register_pickle_by_value(module)


def name_of(value: object) -> str:
    """Return the text by which `load` finds a function or class again: MODULE:NAME, or FILE.py:NAME with the absolute
    path of the file; "" if there is none."""
    module, name = sys.modules.get(getattr(value, "__module__", None) or ""), getattr(value, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or "<" in name or getattr(module, name, None) is not value:
        return ""
    file = Path(getattr(module, "__file__", None) or "")
    # A module that was loaded from a file: nothing can import it by this name.
    of_file = re.fullmatch(rf"{re.escape(file.stem)}_[0-9a-f]{{12}}", module.__name__)
    return f"{file if of_file else module.__name__}:{name}"


def shown(text: str) -> str:
    """Return a text for `load` with its file relative to the working directory, if it is in there."""
    file, colon, name = text.rpartition(":")
    path = Path(file)
    return f"{path.relative_to(Path.cwd())}{colon}{name}" if path.is_relative_to(Path.cwd()) else text


def _of_name(place: str, flag: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as for `python -m`
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # A module that the user's own module imports may be missing instead.
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise _failed(place, flag, error) from error
        raise ConfigError(
            f"{flag} {place}: there is no module {error.name}",
            hint="start in a folder from which it can be imported, or name its file as FILE.py:NAME",
        ) from None
    except (Exception, SystemExit) as error:
        raise _failed(place, flag, error) from error


def _of_file(path: Path, flag: str) -> ModuleType:
    import cloudpickle

    try:
        path = path.resolve(strict=True)
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}", hint="name an existing Python file") from None
    # An edited file gets another name, and so is loaded again.
    digest = hashlib.sha256(str(path).encode() + source).hexdigest()[:12]
    name = f"{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a path that ends in .py"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(str(path), flag, error) from error
    # Other processes could not import a module by this name.
    cloudpickle.register_pickle_by_value(module)
    return module


def line_of(error: BaseException) -> str:
    """Return FILE:LINE of the innermost frame in the user's code, or else of the innermost frame.

    Code of Python itself, of installed packages and of this package is not the user's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # Names of code without a file begin with "<", such as "<string>".
    library_prefixes = (*_not_users(), "<")
    user_frames = [frame for frame in frames if not frame.filename.startswith(library_prefixes)]
    last_frame = next(reversed(user_frames or frames), None)
    return f"{last_frame.filename}:{last_frame.lineno}" if last_frame else ""


def _not_users() -> tuple[str, ...]:
    """Return the beginnings of paths of code that is not the user's."""
    places = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return tuple(f"{place}/" for place in (*places, Path(__file__).parent.parent))


def _failed(place: str, flag: str, error: Exception | SystemExit) -> ConfigError:
    location = f" ({line_of(error)})"
    if isinstance(error, SystemExit):
        return ConfigError(
            f"{flag} {place} ends the program with {error.code!r:.200} when it is imported{location}",
            hint='call its main function under `if __name__ == "__main__":` only',
        )
    if isinstance(error, SyntaxError):
        location = f" ({error.filename}:{error.lineno})"
        error.msg = error.msg or ""
        return ConfigError(
            f"{flag} {place} cannot be imported: SyntaxError: {error.msg}{location}", hint="fix the file"
        )
    return ConfigError(
        f"{flag} {place} cannot be imported: {type(error).__name__}: {error}{location}", hint="fix it, or its imports"
    )
