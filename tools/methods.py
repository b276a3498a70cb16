"""Fill the pages of docs/methods from the code: options, source lines, comparisons and curves.

    python -m tools.methods          # writes the table of docs/methods/index.md
    python -m tools.methods --check  # exits with 1 if it is not up to date, or a loss lacks its name or its page

As a hook of mkdocs, this adds the pages to the site's navigation, and to each page what its front matter names, when
the site is built, so that neither can go stale. In docs/reference, `<!-- options: FLAG -->` becomes a table for each
name that the flag takes, and `<!-- flags -->` one for each group of flags. Formulas become MathML, which browsers
render by themselves. The keys of a page's front matter:

    title, kind, change, source, flag   its row in the index; `kind` is one of KINDS
    options    names of losses, MODULE:CLASS with the prefix of its flags, or MODULE:FUNCTION
    code       MODULE:QUALNAME, or with [NAME] only that case of its match statement; losses need none
    compared   methods of `python -m benchmarks.conformance`; those in docs/figures/conformance.json are shown
    presets    true for a table of the corrections that have a name
    curves     names of pictures/methods/NAME.svg; by default the losses in `options` and the `estimators`
    estimators names of --advantages
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import html
import importlib
import inspect
import json
import pkgutil
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
import yaml  # type: ignore[import-untyped]

import forge_rl
from forge_rl import algorithms
from forge_rl.algorithms.components import LossBySource
from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.loss_flag import METHODS
from forge_rl.algorithms.losses import PolicyLoss
from forge_rl.algorithms.protocol import Loss
from forge_rl.envs.env_flag import ENVIRONMENTS
from forge_rl.flags.fields import flags_of, usable_flags
from forge_rl.rewards.reward_flag import REWARDS
from forge_rl.runtime.job_flag import JOBS

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "methods"
KINDS = ("Policy losses", "Advantages", "Around the loss", "Other losses", "Data and rewards")
"""Kinds of methods, in the order of the index."""
NAMES: Mapping[str, Mapping[str, str]] = {
    "tasks": {"": "forge_rl.data.sources.rows:Columns"},
    "env": ENVIRONMENTS.places,
    "reward": REWARDS.places,
    "job": JOBS.places,
}
"""Where the objects are, as MODULE:NAME, whose options the names of a flag take; "" for any name."""
_SHARED = (LossBySource,)
"""Losses that no page is about."""
_CURVES = "On the demo's task, as [all methods](../figures/methods.md) were measured.\n"
_INDEX = re.compile(r"(<!-- methods -->\n).*?(?=<!-- end -->)", re.DOTALL)
_FRONT = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
_PLACE = re.compile(r"<!-- (?:flags|options: (\w+)) -->")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Write the index of methods."""

    check: bool = False
    """Only say whether the index is up to date."""


def methods() -> dict[str, dict[str, Any]]:
    """Return the front matter of all pages by name, in the order of the index."""
    pages = {path.stem: front_of(path) for path in FOLDER.glob("*.md") if path.stem != "index"}
    return dict(sorted(pages.items(), key=lambda item: (KINDS.index(item[1]["kind"]), item[1]["title"].lower())))


def front_of(path: Path) -> dict[str, Any]:
    """Return the front matter of a page; empty if it has none."""
    match = _FRONT.match(path.read_text())
    return yaml.safe_load(match[1]) if match else {}


def index(page: str) -> str:
    """Return the index with its tables filled in."""
    lines: list[str] = []
    kind = ""
    for name, front in methods().items():
        if front["kind"] != kind:
            kind = front["kind"]
            lines += [
                "",
                f"## {kind}",
                "",
                "| method | what it changes | source | flag | TRL, verl |",
                "|---|---|---|---|---|",
            ]
        cells = [f"[{front['title']}]({name}.md)", front["change"], front.get("source", ""), front.get("flag", "")]
        lines.append(f"| {' | '.join([*cells, '; '.join(_verdicts(front.get('compared', [])))])} |")
    return _INDEX.sub(lambda match: match[1] + "\n".join([*lines, "", ""]), page)


def _verdicts(compared: Sequence[str]) -> Iterator[str]:
    """Yield what the comparison with other implementations found."""
    equal = [peer for peer in ("TRL", "verl") if any(not row["differs_on_purpose"] for row in _rows(compared, peer))]
    if equal:
        yield f"equal to {' and '.join(equal)}"
    for row in _rows(compared):
        if row["differs_on_purpose"]:
            yield f"{row['method']} differs from {row['peer']}: {row['differs_on_purpose']}"


def _rows(compared: Sequence[str], peer: str = "") -> list[dict[str, Any]]:
    return [row for name in compared for row in conformance().get(name, []) if row["peer"] == (peer or row["peer"])]


@functools.cache
def conformance() -> Mapping[str, Sequence[dict[str, Any]]]:
    """Return the rows of docs/figures/conformance.json by method."""
    rows_by_method: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads((ROOT / "docs" / "figures" / "conformance.json").read_text())["rows"]:
        rows_by_method.setdefault(row["method"], []).append(row)
    return rows_by_method


def sections(front: Mapping[str, Any]) -> str:
    """Return the sections that a page's front matter names."""
    options: list[str] = front.get("options", [])
    losses = [name for name in options if name in METHODS]
    parts = [_loss_options(losses)] if losses else []
    parts += [_presets()] if front.get("presets") else []
    parts += [_options(text) for text in options if text not in METHODS]
    code = [*front.get("code", []), *(ref for name in losses[:1] for ref in _code_of(name))]
    pictures = dict.fromkeys(front.get("curves", [*losses, *front.get("estimators", [])]))
    existing_pictures = [name for name in pictures if (ROOT / f"docs/pictures/methods/{name}.svg").exists()]
    texts = {
        "Options": "\n".join(parts),
        "Code": "\n".join(map(source_of, code)),
        "Compared": compared(front.get("compared", [])),
        "Curve": "\n".join([*(f"![{name}](../pictures/methods/{name}.svg)" for name in existing_pictures), "", _CURVES])
        if existing_pictures
        else "",
    }
    return "".join(f"\n## {title}\n\n{text}" for title, text in texts.items() if text)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows]
    return "\n".join([*lines, ""])


def _loss_options(names: Sequence[str]) -> str:
    """Return a table of the options that not all policy losses share, with a default for each name."""
    flags_by_loss = [
        {flag.dotted: flag for flag in flags_of(type(loss), loss)} for loss in (METHODS[name]() for name in names)
    ]
    common = {flag.dotted: flag.value for flag in flags_of(PolicyLoss)}
    keys = [
        key
        for key in flags_by_loss[0]
        if any(key not in common or flags[key].value != common[key] for flags in flags_by_loss)
    ]
    rows = [
        [f"`{key}`", *(f"`{flags[key].value}`" for flags in flags_by_loss), flags_by_loss[0][key].text] for key in keys
    ]
    text = _table(["option", *(f"`{name}`" for name in names), "meaning"], rows) if rows else ""
    is_policy = isinstance(METHODS[names[0]](), PolicyLoss)
    return text + ("\nAlso the [options of every policy loss](options.md).\n" if is_policy else "")


def _presets() -> str:
    """Return a table of the corrections that have a name."""
    fields = [flag.dotted for flag in flags_of(Correction)]
    rows = [
        [f"`{name}`", *(f"`{value}`" if (value := getattr(preset, field)) != "" else "" for field in fields)]
        for name, preset in Correction.presets.items()
    ]
    return _table(["`correction=`", *fields], rows)


def _options(text: str) -> str:
    """Return a table of a config's fields, as flags or options, or of a function's parameters."""
    name, _, prefix = text.partition(" ")
    target = resolve(name)
    if dataclasses.is_dataclass(target):
        rows = _fields(target, prefix)
        return _table(["flag" if prefix.startswith("--") else "option", "default", "meaning"], rows) if rows else ""
    described = _described(inspect.getdoc(target) or "")
    rows = []
    for parameter in inspect.signature(target).parameters.values():
        if parameter.name == "settings":  # whose fields are options themselves: see `flags.options`
            kind = str(parameter.annotation).partition(" ")[0]
            rows += _fields(resolve(f"{target.__module__}:{kind}"), prefix)
        elif parameter.name in described:
            takes_any = parameter.kind is parameter.VAR_KEYWORD
            default = tyro.MISSING if parameter.default is parameter.empty and not takes_any else parameter.default
            name = "any other" if takes_any else f"`{parameter.name}`"
            rows.append([name, _shown(default), described[parameter.name]])
    return _table([f"parameter of `{target.__name__}`", "default", "meaning"], rows) if rows else ""


def _fields(kind: Any, prefix: str) -> list[list[str]]:
    """Return a row for each field of a config: its flag or option, default and meaning."""
    return [
        [f"`{flag.name if prefix.startswith('--') else prefix + flag.dotted}`", _shown(flag.value), flag.text]
        for flag in flags_of(kind, prefix=prefix or "--")
    ]


def options_by_name(flag: str) -> str:
    """Return what each name of a flag is, and a table of its options."""
    parts = []
    for name, place in sorted(NAMES[flag].items()):
        about = " ".join((inspect.getdoc(resolve(place)) or "").partition("\n\n")[0].split())
        parts += [f"### `{name}` {{ #{flag}-{name.replace('_', '-')} }}\n", f"{about}\n"] if name else []
        parts.append(_options(place) or "It has no options.\n")
    return "\n".join(parts)


def flags_by_group() -> str:
    """Return a table for each group of flags: first those of `recipes.grpo`, then those that other recipes add."""
    groups: dict[str, dict[str, list[str]]] = {}
    recipes = importlib.import_module("forge_rl.recipes")  # a package of the installation alone
    modules = [module.name for module in pkgutil.iter_modules(recipes.__path__) if not module.ispkg]
    for name in sorted(modules, key=lambda name: name != "grpo"):
        for flag in usable_flags(importlib.import_module(f"{recipes.__name__}.{name}").Config):
            rows = groups.setdefault(flag.path[0] if len(flag.path) > 1 else f"recipes.{name}", {})
            if not any(flag.name in other_rows for other_rows in groups.values()):
                rows[flag.name] = [f"`{flag.name}`", _shown(flag.value), flag.text]
    columns = ["flag", "default", "meaning"]
    return "\n".join(f"## {name}\n\n{_table(columns, [*rows.values()])}" for name, rows in groups.items() if rows)


def _shown(value: object) -> str:
    if callable(value) or value is None or value == "" or str(ROOT) in str(value):
        return ""
    if isinstance(value, Path) and value.is_relative_to(Path.home()):
        value = Path("~", value.relative_to(Path.home()))
    return "required" if value is tyro.MISSING else f"`{value!r}`" if isinstance(value, str) else f"`{value}`"


def _described(doc: str) -> dict[str, str]:
    """Return the texts of a docstring's Args by name."""
    descriptions: dict[str, str] = {}
    inside = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, flags=re.DOTALL | re.MULTILINE)
    for names, text in re.findall(
        r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", inside[1] if inside else "", re.DOTALL | re.MULTILINE
    ):
        description = " ".join(text.split())
        descriptions |= dict.fromkeys(names.split(", "), description[:1].upper() + description[1:])
    return descriptions


def resolve(ref: str) -> Any:
    """Return the object that MODULE:QUALNAME names."""
    module, _, name = ref.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def _code_of(name: str) -> Iterator[str]:
    """Yield references to the functions that define a loss, in its class and the classes it inherits from."""
    kind = type(METHODS[name]())
    bases = [ancestor for ancestor in kind.__mro__ if ancestor.__module__ != PolicyLoss.__mro__[1].__module__]
    for base in reversed(bases):
        for function in ("statistics", "_clipped", "token_losses", "__call__"):
            if base not in (PolicyLoss, object) and function in vars(base):
                yield f"{base.__module__}:{base.__qualname__}.{function}"


def source_of(ref: str) -> str:
    """Return the source of a function or class without docstrings as a block of Markdown, below its file and line."""
    name, _, case = ref.removesuffix("]").partition("[")
    target: Any = resolve(name)
    target = getattr(target, "fget", target)  # of a property
    lines, start = inspect.getsourcelines(target)
    text = textwrap.dedent("".join(lines))
    tree = ast.parse(text)
    dropped = {number for node in ast.walk(tree) for number in _dropped(node, case)}
    assert not case or any(isinstance(node, ast.Match) for node in ast.walk(tree)), ref
    kept_lines = [line for number, line in enumerate(text.splitlines(), 1) if number not in dropped]
    path = Path(inspect.getfile(target)).relative_to(ROOT)
    return f"`{path}`, line {start}:\n\n``` {{ .python }}\n" + "\n".join(kept_lines).strip("\n") + "\n```\n"


def _dropped(node: ast.AST, case: str) -> Iterator[int]:
    """Yield the lines of a docstring, and of cases other than the wanted one."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
        yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    if case and isinstance(node, ast.Match):
        for match_case in node.cases:
            if f"'{case}'" not in ast.unparse(match_case.pattern):
                yield from range(match_case.pattern.lineno, (match_case.body[-1].end_lineno or 0) + 1)


def compared(names: Sequence[str]) -> str:
    """Return a table of the comparisons of these methods."""
    rows = []
    for row in _rows(names):
        worst = max(row[key] for key in ("loss", "gradient", "entropy_gradient", "advantages", "returns") if key in row)
        rows.append([row["method"], row["peer"], f"`{row['function']}`", f"{worst:.2g}", row["differs_on_purpose"]])
    columns = ["method", "peer", "its function", "largest deviation", "differs because"]
    return _table(columns, rows) + "\n[What this compares](../figures/conformance.md).\n" if rows else ""


def losses() -> Iterator[type[Loss]]:
    """Yield the public losses that forge_rl.algorithms defines."""
    for module in pkgutil.iter_modules(algorithms.__path__, f"{algorithms.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            is_loss = isinstance(value, type) and issubclass(value, Loss) and value is not Loss
            if is_loss and value.__module__ == module.name and not name.startswith("_"):
                yield value


def lacking(kinds: Iterable[type[Loss]], pages: Mapping[str, Mapping[str, Any]], public: Collection[str]) -> list[str]:
    """Return what losses lack to be found by users, each with what to do: a page, and a public name.

    Args:
        pages: front matter of the pages, by name.
        public: public names of forge_rl.
    """
    options = {name for front in pages.values() for name in front.get("options", [])}
    code = " ".join([ref for front in pages.values() for ref in (*front.get("code", []), *front.get("options", []))])
    texts = []
    for kind in kinds:
        names = vars(kind).get("flag_names", {})
        texts += [
            f"--loss {name} ({kind.__name__}) has no page: add docs/methods/{name}.md with `options: [{name}]`"
            for name in names
            if name not in options
        ]
        if not (names or kind in _SHARED or re.search(rf":{kind.__name__}\b", code)):
            texts.append(f"{kind.__name__} is on no page: give it `flag_names`, or name it in the `code` of one")
        if kind.__name__ not in public:
            texts.append(f"{kind.__name__} is not public: add its line to forge_rl/__init__.pyi")
    return texts


def on_config(config: Any) -> Any:
    """Add the pages to the navigation, by kind; called by mkdocs."""
    pages_by_kind: dict[str, list[str]] = {}
    for name, front in methods().items():
        pages_by_kind.setdefault(front["kind"], []).append(f"methods/{name}.md")
    [section] = [entry for entry in config["nav"] if "Methods" in entry]
    section["Methods"] += [{kind: pages} for kind, pages in pages_by_kind.items()]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Append the sections of a page of a method, and the tables of the pages of flags and options; called by mkdocs."""
    if page.file.src_uri.startswith("reference/"):
        return _PLACE.sub(lambda match: options_by_name(match[1]) if match[1] else flags_by_group(), markdown)
    return markdown + sections(page.meta) if page.file.src_uri.startswith("methods/") else markdown


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Turn formulas into MathML; called by mkdocs."""
    return _FORMULA.sub(lambda match: mathml(html.unescape(match[2]), display=match[1] == "div"), content)


def mathml(formula: str, *, display: bool = False) -> str:
    """Return a LaTeX formula as MathML, in a scrolling box if it stands alone."""
    from latex2mathml.converter import convert

    markup: str = convert(formula.strip(), display="block" if display else "inline")
    return f'<div class="formula">{markup}</div>' if display else markup


def main(config: Config) -> int:
    """Check that each loss has its page, and write or check the index; return the exit status."""
    path = FOLDER / "index.md"
    text = path.read_text()
    if texts := lacking(losses(), methods(), forge_rl.__all__):
        print("\n".join(texts))
        return 1
    if (new := index(text)) == text:
        return 0
    if config.check:
        print(f"{path.relative_to(ROOT)} is not up to date: python -m tools.methods")
        return 1
    path.write_text(new)
    print(f"{path.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
