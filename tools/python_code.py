"""What a Python file computes, to compare two versions of it: see `read_code`."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Import: TypeAlias = ast.Import | ast.ImportFrom
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, *_Comprehension.__args__)
_READERS = {"locals", "vars", "eval", "exec"}
"""Functions by which code may read its local variables by name."""


@dataclass(frozen=True)
class Code:
    """What a Python file computes."""

    text: str
    """Its syntax tree as text, without imported names, whose origins are in `origins`."""
    origins: tuple[str, ...]
    """Origins of unused imports, then of each use of an import, as MODULE:NAME, or MODULE: for a module."""


def read_code(text: str, module: str = "") -> Code:
    """Return what a Python file computes.

    Left out are comments, docstrings, annotations outside of classes, texts of errors, imports that only annotations
    use, and the names of functions' local variables and of aliases. Annotations of classes' fields stay, as flags and
    dataclasses read them.

    Args:
        module: its dotted name, from which relative imports are resolved.

    Raises:
        SyntaxError: it is not Python.
    """
    tree = ast.parse(text)
    reader = _Reader(module, renames=_READERS.isdisjoint(_called_names(tree)))
    return Code(ast.dump(reader.read(tree)), tuple(reader.origins))


def definition(text: str, name: str, module: str = "") -> str | None:
    """Return where a module imports a name from, as in `Code.origins`, or else the code by which it defines the name;
    None if it does neither at its top level."""
    tree = ast.parse(text)
    parts = [part for part in tree.body if name in _bound_names(part)]
    imports = [origin for part in parts if isinstance(part, _Import) for origin in _origins(part, module, [name])]
    if imports or not parts:
        return imports[-1] if imports else None
    return ast.dump(_Reader(module, renames=True).read(ast.Module(body=list(parts), type_ignores=[])))


@dataclass
class _Reader(ast.NodeTransformer):
    """Drops from a syntax tree what computes nothing, and numbers local variables."""

    module: str
    renames: bool
    origins: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)
    """What each name that is visible stands for."""
    _enclosing: dict[str, str] = field(default_factory=dict)
    """The same for functions that begin here, which do not see the names of a class."""
    _globals: dict[str, str] = field(default_factory=dict)
    _in_class: bool = False

    def read(self, tree: ast.Module) -> ast.AST:
        """Return the rewritten tree."""
        self._globals = self._imported_names(tree.body)
        self._names = self._enclosing = self._globals
        used_names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for part in _executed(tree.body):  # imports for what they do, or for others to import
            if isinstance(part, _Import):
                names = [name for name in _bound_names(part) if name not in used_names]
                self.origins += sorted(_origins(part, self.module, names))
        return self.generic_visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        """Drop it: each use says where it comes from."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Drop it, as `visit_Import` does."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        """Drop what only type checkers read."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return list(itertools.chain(*(_as_list(self.visit(part)) for part in node.orelse)))
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if self._in_class:
            return self.generic_visit(node)
        if node.value is None:
            return None
        return ast.Assign(targets=[self.visit(node.target)], value=self.visit(node.value), lineno=0)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Keep the error and its values, without its texts."""
        if isinstance(node.exc, ast.Call):
            node.exc.args = [_without_text(value) for value in node.exc.args]
            for keyword in node.exc.keywords:
                keyword.value = _without_text(keyword.value)
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Assert(test=self.visit(node.test), msg=None)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: _Function) -> ast.AST:
        node.returns = None
        node.decorator_list = [self.visit(part) for part in node.decorator_list]
        self._visit_defaults(node.args)
        node.name = self._names.get(node.name, node.name) if not self._in_class else node.name
        parameters = _parameters(node.args)
        with self._scope(self._local_names(node.body, parameters)):
            node.args = self._without_annotations(node.args)
            node.body = list(itertools.chain(*(_as_list(self.visit(part)) for part in node.body)))
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._visit_defaults(node.args)
        with self._scope(self._local_names([], _parameters(node.args))):
            node.args, node.body = self._without_annotations(node.args), self.visit(node.body)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [self.visit(part) for part in node.decorator_list]
        node.bases = [self.visit(part) for part in node.bases]
        node.keywords = [self.visit(part) for part in node.keywords]
        outer_names, outer_in_class = self._names, self._in_class
        self._names = self._names | {name: name for part in node.body for name in _bound_names(part)}
        self._names |= self._imported_names(node.body)
        self._in_class = True
        node.body = list(itertools.chain(*(_as_list(self.visit(part)) for part in node.body)))
        self._names, self._in_class = outer_names, outer_in_class
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        return self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self._comprehension(node)

    def _comprehension(self, node: _Comprehension) -> ast.AST:
        targets = [name for part in node.generators for name in _bound_names(part.target)]
        first_iterable = self.visit(node.generators[0].iter)
        node.generators[0].iter = ast.Constant(None)
        walrus_names = {part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr)}
        names = self._numbered_names([name for name in targets if name not in walrus_names])
        with self._scope(names):
            self.generic_visit(node)
        node.generators[0].iter = first_iterable
        return node

    def visit_Global(self, node: ast.Global) -> ast.AST:
        return ast.Global(names=[self._globals.get(name, name) for name in node.names])

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return ast.Nonlocal(names=[self._names.get(name, name) for name in node.names])

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = node.name and self._names.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> ast.AST:
        node.name = node.name and self._names.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> ast.AST:
        return ast.MatchStar(name=node.name and self._names.get(node.name, node.name))

    def visit_MatchMapping(self, node: ast.MatchMapping) -> ast.AST:
        node.rest = node.rest and self._names.get(node.rest, node.rest)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = self._names.get(node.id, node.id)
        if name.startswith("import "):
            self.origins.append(name.removeprefix("import "))
            name = "import"
        return ast.Name(id=name, ctx=type(node.ctx)())

    def _visit_defaults(self, arguments: ast.arguments) -> None:
        """Rewrite the defaults, which are computed outside of the function."""
        arguments.defaults = [self.visit(value) for value in arguments.defaults]
        arguments.kw_defaults = [value and self.visit(value) for value in arguments.kw_defaults]

    def _without_annotations(self, arguments: ast.arguments) -> ast.arguments:
        """Drop the annotations of parameters, and return the arguments."""
        for parameter in _parameter_nodes(arguments):
            parameter.annotation = None
        return arguments

    def _local_names(self, body: list[ast.stmt], parameters: list[str]) -> dict[str, str]:
        """Return what the names that a function binds stand for."""
        declared = [part for part in _scope_nodes(body) if isinstance(part, ast.Global | ast.Nonlocal)]
        outer_names = {name for part in declared for name in part.names} | {*parameters}
        names = [name for part in body for name in _bound_names(part) if name not in outer_names]
        global_names = {name for part in declared if isinstance(part, ast.Global) for name in part.names}
        shared_names = {name: self._globals.get(name, name) for name in global_names}
        return (
            {name: name for name in parameters}
            | self._numbered_names(names)
            | self._imported_names(body)
            | shared_names
        )

    def _numbered_names(self, names: list[str]) -> dict[str, str]:
        if not self.renames:
            return {name: name for name in names}
        visible_names = {*self._enclosing.values(), *self._names.values()}
        numbers = [int(name.removeprefix("local ")) for name in visible_names if name.startswith("local ")]
        first = max(numbers, default=-1) + 1
        return {name: f"local {first + index}" for index, name in enumerate(dict.fromkeys(names))}

    def _imported_names(self, body: list[ast.stmt]) -> dict[str, str]:
        """Return the origin of each name that the statements of a scope import."""
        imports = [part for part in _scope_nodes(body) if isinstance(part, _Import)]
        return {
            name: f"import {origin}"
            for part in imports
            for name in _bound_names(part)
            for origin in _origins(part, self.module, [name])
        }

    @contextmanager
    def _scope(self, names: dict[str, str]) -> Iterator[None]:
        saved = self._names, self._enclosing, self._in_class
        self._names = self._enclosing = self._enclosing | names
        self._in_class = False
        yield
        self._names, self._enclosing, self._in_class = saved


def _as_list(result: ast.AST | list[ast.stmt] | None) -> list[ast.stmt]:
    return result if isinstance(result, list) else [] if result is None else [result]  # type: ignore[list-item]


def _without_text(value: ast.expr) -> ast.expr:
    is_text = isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))
    return ast.Constant("text") if is_text else value


def _parameter_nodes(arguments: ast.arguments) -> list[ast.arg]:
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return parameters + [parameter for parameter in (arguments.vararg, arguments.kwarg) if parameter is not None]


def _parameters(arguments: ast.arguments) -> list[str]:
    return [parameter.arg for parameter in _parameter_nodes(arguments)]


def _called_names(tree: ast.AST) -> set[str]:
    """Return the functions that a tree calls by name; `vars` only without arguments, as it then reads local names."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return {call.func.id for call in calls if call.func.id != "vars" or not call.args}  # type: ignore[attr-defined]


def _scope_nodes(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of a scope in order, without nodes of nested scopes."""
    for node in nodes:
        yield node
        if not isinstance(node, _SCOPES):
            yield from _scope_nodes(list(ast.iter_child_nodes(node)))  # type: ignore[arg-type]


def _bound_names(node: ast.AST) -> list[str]:
    """Return the names that a statement or target binds in its scope, in order."""
    names: list[str] = []
    for part in _scope_nodes([node]):  # type: ignore[list-item]
        match part:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.FunctionDef(name=name):
                names.append(name)
            case ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.append(name)
            case ast.MatchMapping(rest=str(name)):
                names.append(name)
            case ast.Import() | ast.ImportFrom():
                names += [alias.asname or alias.name.partition(".")[0] for alias in part.names]
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                names += [inner.target.id for inner in ast.walk(part) if isinstance(inner, ast.NamedExpr)]
    return names


def _executed(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes below `nodes` in order, without those that only type checkers read."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from _executed(node.orelse)
        else:
            yield from _executed(ast.iter_child_nodes(node))


def _origins(node: _Import, module: str, names: list[str]) -> Iterator[str]:
    """Yield where a statement imports names from, as in `Code.origins`."""
    for alias in node.names:
        is_nested = isinstance(node, ast.Import) and "." in alias.name and not alias.asname  # bound by its first part
        if not is_nested and (alias.asname or alias.name) not in names:
            continue
        if isinstance(node, ast.Import):
            yield f"{alias.name}:"
            continue
        package = module.rsplit(".", node.level)[0] + "." if node.level else ""
        yield f"{package}{node.module or ''}".rstrip(".") + f":{alias.name}"
