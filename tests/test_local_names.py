"""Local names are nouns that say what a value holds: a participle, pronoun or adverb in their place is refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VAGUE = frozenset(
    "found own given each others kept told asked said used_ here at of like some known wanted seen made most least now "
    "one same whole again there shown written held taken sent due gone bad good own_ either both any_ them these those "
    "that this it what which whose how into over under along beside meanwhile spent got came went lost tried allowed "
    "chosen built counted stated called meant".split()
)
"""Words that say nothing of what a value is; other code bases have them in under 0.6% of their bindings."""


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, node.lineno


def vague(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for name, line in bindings(tree) if name in VAGUE]


@pytest.mark.parametrize("folder", ["forge_rl", "recipes", "apps", "tools"])
def test_names_say_what_they_hold(folder: str) -> None:
    assert [place for path in sorted((ROOT / folder).rglob("*.py")) for place in vague(path)] == []
