"""Languages of source files in sessions of the profile `process`: how each is found, compiled and run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from forge_rl.errors import ConfigError
from forge_rl.sandbox.limits import Result, SandboxError
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
    fences: tuple[str, ...] = ()
    """What fences say of it, besides its name."""


_GO = "GOCACHE=/tmp/go-build GOFLAGS=-p=1 GOTOOLCHAIN=local"
LANGUAGES: Mapping[str, Language] = MappingProxyType(
    {
        "python": Language(
            file="main.py", version="python3 --version", run=("python3", "main.py"), fences=("py", "python3")
        ),
        "shell": Language(
            file="main.sh", version="bash --version | head -n 1", run=("bash", "main.sh"), fences=("sh", "bash")
        ),
        "javascript": Language(
            file="main.js", version="node --version", run=("node", "main.js"), fences=("js", "node")
        ),
        "typescript": Language(
            file="main.ts",
            version="node --version > /dev/null && tsc --version",
            compile=("tsc", "--target", "es2020", "--module", "commonjs", "main.ts"),
            run=("node", "main.js"),
            fences=("ts",),
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
            fences=("cpp", "cc", "cxx"),
        ),
        "go": Language(
            file="main.go",
            version="go version",
            compile=("sh", "-c", f"{_GO} go build -o main main.go"),
            run=("./main",),
            fences=("golang",),
        ),
        "rust": Language(
            file="main.rs",
            version="rustc --version",
            compile=("rustc", "-O", "-o", "main", "main.rs"),
            run=("./main",),
            fences=("rs",),
        ),
        "java": Language(
            file="Main.java",
            version="javac -version && java -version 2>&1 | head -n 1",
            compile=("javac", "-J-XX:+UseSerialGC", "-J-XX:TieredStopAtLevel=1", "Main.java"),
            run=("java", "-XX:+UseSerialGC", "Main"),
        ),
        "ruby": Language(file="main.rb", version="ruby --version", run=("ruby", "main.rb"), fences=("rb",)),
    }
)
"""The languages by name. Go compiles its standard library on first use: give it 512 MiB of files and a minute."""


async def installed(session: PoolSession) -> dict[str, str]:
    """Return the version of each language that a session has."""
    versions = {}
    for name, language in LANGUAGES.items():
        result = await session.run(f"set -o pipefail; {language.version}")
        if result.status == 0:
            versions[name] = result.stdout.strip().splitlines()[0]
    return versions


def check_language(language: str) -> Language:
    """Return how a language is compiled and run.

    Raises:
        ConfigError: the language is unknown.
    """
    if language not in LANGUAGES:
        raise ConfigError(f"unknown language {language!r:.80}", hint=f"choose from {', '.join(LANGUAGES)}")
    return LANGUAGES[language]


async def build_source(
    session: PoolSession, language: str, source: str, *, wall_s: float | None = None
) -> Result | None:
    """Write a source file to a session's folder and compile it; return the result of a failed compilation, else None.

    Raises:
        ConfigError: the language is unknown.
        SandboxError: the session has ended before, or the sandbox failed; or the language is not installed.
    """
    toolchain = check_language(language)
    if (await session.run(f"set -o pipefail; {toolchain.version}")).status != 0:
        raise SandboxError(f"{language} is not installed here", hint="see `forge_rl.sandbox.languages.installed`")
    await session.put(toolchain.file, source.encode("utf-8", "replace"))
    if not toolchain.compile:
        return None
    result = await session.run(toolchain.compile, wall_s=wall_s)
    return result if result.error is not None or result.status != 0 else None


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
        SandboxError: the session has ended before, or the sandbox failed; or the language is not installed.
    """
    failure = await build_source(session, language, source, wall_s=wall_s)
    return failure or await session.run(LANGUAGES[language].run, wall_s=wall_s, stdin=stdin)
