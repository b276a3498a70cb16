"""Objects by name that are imported on first use: kinds that flags name, public names, and entries of wings."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class LazyNames(Mapping[str, T]):
    """Maps names to objects, each given as MODULE:NAME and imported when it is looked up.

        JOBS: LazyNames[type[Job]] = LazyNames({"slurm": "forge_rl.jobs.slurm:SlurmJob"})
        JOBS["slurm"]

    Iteration, `len` and `in` import nothing. This is the only way in which the core reaches a wing; see
    `tests/test_layers.py`.

    Args:
        places: MODULE:NAME of each object, by name.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = places

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self.places[name].partition(":")
        value: T = getattr(importlib.import_module(module), attribute)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def public_names(file: str) -> LazyNames[object]:
    """Return the public names of a package: what the stub next to its `__init__.py` imports.

    Args:
        file: the package's `__file__`.
    """
    stub = ast.parse(Path(file).with_name("__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return LazyNames({alias.name: f"{node.module}:{alias.name}" for node in imports for alias in node.names})


def lazy_package(package: str, file: str) -> tuple[list[str], Callable[[str], object]]:
    """Return `__all__` and `__getattr__` of a package that imports each public name on first use.

    __all__, __getattr__ = lazy_package(__name__, __file__)
    """
    names = public_names(file)

    def attribute(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return names[name]

    return sorted(names), attribute
