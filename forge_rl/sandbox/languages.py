"""Languages of source files in sessions of the profile `process`: how each is found, compiled and run."""

from __future__ import annotations

import difflib
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from forge_rl.errors import ConfigError
from forge_rl.sandbox.limits import Result
from forge_rl.sandbox.session import PoolSession


@dataclass(frozen=True, kw_only=True)
class Language:
    """How source files of a language are compiled and run. `run_source` uses it."""

    file: str
    """Name of a source file."""
    version: str
    """Line for the shell that prints the version, and fails where the language is absent."""
    run: tuple[str, ...]
    """Program and arguments."""
    compile: tuple[str, ...] = ()
    """Program and arguments of the compiler; () for languages that are not compiled."""
    aliases: tuple[str, ...] = ()
    """Further names on fenced blocks."""

    @property
    def fences(self) -> frozenset[str]:
        """Names of the language on fenced blocks: none, the suffix of its files, or an alias."""
        return frozenset({"", self.file.rpartition(".")[2], *self.aliases})


# -p=1: one compiler process at a time. GOTOOLCHAIN=local: no download of another version.
_GO = "GOCACHE=/tmp/go-build GOFLAGS=-p=1 GOTOOLCHAIN=local"
LANGUAGES: Mapping[str, Language] = MappingProxyType(
    {
        "python": Language(file="main.py", version="python3 --version", run=("python3", "main.py")),
        "shell": Language(
            file="main.sh",
            version="bash --version | head -n 1",
            run=("bash", "main.sh"),
            aliases=("bash", "zsh", "console"),
        ),
        "javascript": Language(file="main.js", version="node --version", run=("node", "main.js")),
        "typescript": Language(
            file="main.ts",
            version="node --version > /dev/null && tsc --version",
            compile=("tsc", "--target", "es2020", "--module", "commonjs", "main.ts"),
            run=("node", "main.js"),
        ),
        "c": Language(
            file="main.c",
            version="gcc --version | head -n 1",
            compile=("gcc", "-O2", "-std=gnu17", "-o", "main", "main.c", "-lm"),
            run=("./main",),
        ),
        "c++": Language(
            file="main.cpp",
            version="g++ --version | head -n 1",
            compile=("g++", "-O2", "-std=gnu++20", "-o", "main", "main.cpp"),
            run=("./main",),
            aliases=("cc", "cxx"),
        ),
        "go": Language(
            file="main.go",
            version="go version",
            compile=("sh", "-c", f"{_GO} go build -o main main.go"),
            run=("./main",),
            aliases=("golang",),
        ),
        "rust": Language(
            file="main.rs", version="rustc --version", compile=("rustc", "-O", "-o", "main", "main.rs"), run=("./main",)
        ),
        "java": Language(
            file="Main.java",
            version="javac -version && java -version 2>&1 | head -n 1",
            compile=("javac", "-J-XX:+UseSerialGC", "-J-XX:TieredStopAtLevel=1", "Main.java"),
            run=("java", "-XX:+UseSerialGC", "Main"),
        ),
        "ruby": Language(file="main.rb", version="ruby --version", run=("ruby", "main.rb")),
    }
)
"""The languages by name. Go compiles its standard library on first use: give it 512 MiB of files and a minute."""


def check_language(name: str) -> None:
    """Check that this machine has a language.

    Raises:
        ConfigError: it is unknown, or its compiler or interpreter is not installed.
    """
    # Without pipefail, `head` would hide that the compiler is missing.
    command = ["bash", "-c", f"set -o pipefail; {_named(name).version}"]
    if subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
        raise ConfigError(
            f"{name} is not installed: `{command[2]}` fails", hint="install it for all users of this machine"
        )


def _named(name: str) -> Language:
    if name in LANGUAGES:
        return LANGUAGES[name]
    close = difflib.get_close_matches(name, LANGUAGES, n=1)
    suggestion = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"unknown language {name!r:.80}", hint=f"{suggestion}languages: {', '.join(sorted(LANGUAGES))}")


async def installed(session: PoolSession) -> dict[str, str]:
    """Return the version of each language that a session has."""
    versions = {}
    for name, language in LANGUAGES.items():
        result = await session.run(f"set -o pipefail; {language.version}")
        if result.status == 0:
            versions[name] = result.stdout.strip().splitlines()[0]
    return versions


async def run_source(
    session: PoolSession, language: str, source: str, *, stdin: bytes = b"", wall_s: float | None = None
) -> Result:
    """Compile and run a source file in a session's folder; return the result of the run, or of a failed compilation.

        async with Pool(profile="process") as pool, pool.session() as session:
            result = await run_source(session, "ruby", "puts gets.to_i * 2", stdin=b"21")

    Args:
        language: a name in LANGUAGES.
        stdin: the program's standard input.
        wall_s: seconds for each step instead of the session's limit.

    Raises:
        ConfigError: the language is unknown.
        SandboxError: the session has ended before, or the sandbox failed.
    """
    toolchain = _named(language)
    await session.put(toolchain.file, source.encode("utf-8", "replace"))
    if toolchain.compile:
        result = await session.run(toolchain.compile, wall_s=wall_s)
        if result.error is not None or result.status != 0:
            return result
    return await session.run(toolchain.run, wall_s=wall_s, stdin=stdin)
