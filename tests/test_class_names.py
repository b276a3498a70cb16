"""A class name of the program stands for one thing, and is a noun."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
NESTED = "Config"
"""Name that many classes give the class of their own settings, nested in them, as torchtitan's modules do."""
NOUNS = frozenset({"Need"})
"""Single words that end like participles and are none."""


@functools.cache
def class_names(folder: Path) -> tuple[tuple[str, str], ...]:
    """The name of each class, and its file; without the nested `Config` classes."""
    names: list[tuple[str, str]] = []
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        nested = {id(node) for outer in classes for node in outer.body if getattr(node, "name", "") == NESTED}
        names += ((node.name, str(path.relative_to(folder))) for node in classes if id(node) not in nested)
    return tuple(names)


def clashes(folder: Path) -> dict[str, list[str]]:
    """Return the files of each name that two files give a class, with or without a leading underscore."""
    files = defaultdict[str, list[str]](list)
    for name, file in class_names(folder):
        files[name.lstrip("_")].append(file)
    return {name: places for name, places in files.items() if len(places) > 1}


def test_no_two_classes_have_one_name():
    assert clashes(ROOT / "forge_rl") == {}


def test_no_class_is_named_by_a_participle():
    words = [(file, name) for name, file in class_names(ROOT / "forge_rl") if name.lstrip("_")[1:].islower()]
    assert [place for place in words if place[1].endswith("ed") and place[1] not in NOUNS] == []


def test_clashes_are_found(tmp_path: Path):
    (tmp_path / "linear.py").write_text("class Linear:\n    class Config: ...\n")
    (tmp_path / "norm.py").write_text("class Norm:\n    class Config: ...\n    class Linear: ...\n")
    assert clashes(tmp_path) == {"Linear": ["linear.py", "norm.py"]}
    class_names.cache_clear()
    (tmp_path / "norm.py").write_text("def norm():\n    class _Norm: ...\nclass Config: ...\nclass Norm: ...\n")
    assert clashes(tmp_path) == {"Norm": ["norm.py", "norm.py"]}
