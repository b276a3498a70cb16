"""The `forge-rl` command: runs recipes and apps, and writes recipes to edit.

forge-rl grpo --steps 20
forge-rl new my_recipe.py --from grpo
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import importlib.resources
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.flags.texts import suggest
from forge_rl.system.folders import write_whole
from forge_rl.system.streams import outlive_readers

PLACES = ("recipes", "apps")
"""Packages whose modules are commands; each module has a `Config` and a `main`."""
_QUICK = ("compare", "dashboard", "data", "images", "merge", "push", "report", "runs", "show")
"""Commands that start no service."""
_SHOWS_ONLY = ("compare", "data", "runs", "show")
"""Commands that do nothing but print."""
_COMPANIONS = {"agent-command": "agents/ask_twice.py"}
"""Files that recipes expect next to them."""


def commands() -> dict[str, str]:
    """Find the recipes and apps: dotted module by command name."""
    command_modules = {}
    for place in PLACES:
        package = importlib.import_module(f"forge_rl.{place}")
        for module in pkgutil.iter_modules(package.__path__):
            command_modules[module.name.replace("_", "-")] = f"{package.__name__}.{module.name}"
    return command_modules


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line, `sys.argv` by default. Exits the process after a recipe or an app."""
    arguments = list(sys.argv[1:] if args is None else args)
    outlive_readers(ends=bool(arguments) and arguments[0] in _SHOWS_ONLY)
    command_modules = commands()
    if arguments and (name := arguments[0].replace("_", "-")) in command_modules:
        try:
            from forge_rl.run.first_line import announce

            if name not in _QUICK:
                announce()
            from forge_rl.run.launch import launch  # which takes a second to load

            module = importlib.import_module(command_modules[name])
        except ForgeError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            print("stopped by Ctrl-C", file=sys.stderr)
            sys.exit(130)
        launch(module.Config, module.main, prog=f"forge-rl {name}", args=arguments[1:])
    if arguments and not arguments[0].startswith("-") and arguments[0] != "new":
        hint = suggest(arguments[0], [*command_modules, "new"], "commands")
        sys.exit(f"error: there is no command {arguments[0]!r}\n  hint: {hint}")
    options = _parser(command_modules).parse_args(arguments)
    try:
        print(write_recipe(options.path, options.template, force=options.force))
    except ForgeError as error:
        sys.exit(f"error: {error}")


def write_recipe(path: Path, template: str, *, force: bool = False) -> str:
    """Copy a recipe to a user's file that runs as is, with the program that it trains, if any.

    Returns:
        A line that says how to run it.

    Raises:
        ConfigError: the recipe does not exist, or the file cannot be written.
    """
    recipes = {name: module for name, module in commands().items() if ".recipes." in module}
    name = template.replace("_", "-")
    if name not in recipes:
        raise ConfigError(f"there is no recipe {template!r}", hint=suggest(name, recipes, "recipes"))
    if path.suffix != ".py":
        raise ConfigError(f"{path} is not a Python file", hint="choose a name that ends in .py")
    folder = importlib.resources.files(recipes[name].rpartition(".")[0])
    module = name.replace("-", "_")
    source = folder.joinpath(f"{module}.py").read_text()
    if path.exists() and not force:
        raise ConfigError(f"{path} exists", hint="choose another name, or add --force to overwrite it")
    texts = {path: source.replace(f"python -m recipes.{module}", f"python {path.name}")}
    if name in _COMPANIONS and (force or not (path.parent / _COMPANIONS[name]).exists()):
        # The recipe comes last: if its companion cannot be written, the same command can be repeated.
        texts = {path.parent / _COMPANIONS[name]: folder.joinpath(_COMPANIONS[name]).read_text(), **texts}
    for file, text in texts.items():
        try:
            if file != path:
                file.parent.mkdir(exist_ok=True)
            write_whole(file, text)
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}", hint="choose another path") from error
    return f"wrote {path}; edit it, and run it with: python {path} --help"


def _source_of(module: str) -> str:
    package, _, name = module.rpartition(".")
    return importlib.resources.files(package).joinpath(f"{name}.py").read_text()


def _parser(command_modules: dict[str, str]) -> argparse.ArgumentParser:
    names_by_place = {
        place: ", ".join(sorted(n for n, m in command_modules.items() if f".{place}." in m)) for place in PLACES
    }
    parser = argparse.ArgumentParser(
        prog="forge-rl",
        description="Reinforcement learning for language models.",
        epilog=f"recipes: {names_by_place['recipes']}; apps: {names_by_place['apps']}. "
        "`forge-rl NAME --help` explains its flags.",
    )
    parser.add_argument("--version", action="version", version=f"forge_rl {importlib.metadata.version('forge_rl')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for name, module in sorted(command_modules.items()):
        docstring = ast.get_docstring(ast.parse(_source_of(module))) or ""
        commands.add_parser(name, help=docstring.partition("\n")[0], add_help=False)
    new = commands.add_parser("new", help="write a recipe to edit", description="Write a recipe to edit.")
    new.add_argument("path", type=Path, help="the file to write, such as my_recipe.py")
    new.add_argument(
        "--from", dest="template", default="grpo", metavar="RECIPE", help=f"one of {names_by_place['recipes']}"
    )
    new.add_argument("--force", action="store_true", help="overwrite the file")
    return parser
