"""Shows which features of unmodified client packages work at the gateway with a real engine.

    python -m tools.client_matrix

The packages live in their own environment in a cache folder, created with uv on first use. tools/client_uses.py runs
there and uses them. Prints a Markdown table; exits 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge_rl.models.bundled import default_cache

PACKAGES = (
    *("openai", "openai-agents", "langchain", "langchain-openai", "pydantic-ai-slim[openai,anthropic]"),
    *("smolagents[openai]", "litellm", "anthropic", "instructor"),
)
KEY = "a-key-of-the-matrix"
ROOT = Path(__file__).parent.parent


def environment(folder: Path) -> Path:
    """Return the Python of the packages' environment, creating it if needed."""
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        uv = Path(sys.executable).parent / "uv"
        run = [str(uv) if uv.exists() else "uv"]
        subprocess.run([*run, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True)
        subprocess.run([*run, "pip", "install", "--quiet", "--python", str(python), *PACKAGES], check=True)
        (folder / "made").touch()
    return python


@contextmanager
def gateway(model: str, logs: Path) -> Iterator[str]:
    """Serve a model with a real engine; yield the base URL."""
    flags = ("--port", "0", "--generator.max-model-len", "8192", "--generator.kv-cache-gib", "1")
    command = [sys.executable, "-m", "apps.gateway", "--model", model, "--out", str(logs), *flags]
    variables = {**os.environ, "FORGE_RL_API_KEY": KEY}
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=variables)
    try:
        assert server.stdout is not None
        url = next((line.split()[-1] for line in server.stdout if line.startswith("serving ")), None)
        if url is None:
            sys.exit("the gateway did not start; see above")
        yield url
    finally:
        server.terminate()
        server.wait(60)


def table(results: list[dict[str, str]]) -> str:
    """Return the results as a Markdown table with a row per package."""
    packages = dict.fromkeys((result["package"], result["version"]) for result in results)
    rows = ["| package | works | fails |", "|---|---|---|"]
    for package, version in packages:
        package_results = [result for result in results if result["package"] == package]
        works = ", ".join(result["feature"] for result in package_results if not result["error"])
        fails = "; ".join(f"{result['feature']}: {result['error']}" for result in package_results if result["error"])
        rows.append(f"| {package} {version} | {works} | {fails.replace('|', '/') or '-'} |")
    return "\n".join(rows)


def main() -> None:
    """Create the environment, serve a model, use it with each package, and print the results."""
    parser = argparse.ArgumentParser(description="Show what client packages can do at the gateway.")
    parser.add_argument("--model", default="smollm2-135m", help="bundled model, local folder, or hub id")
    parser.add_argument(
        "--venv", type=Path, default=default_cache() / "client-matrix", help="the packages' environment"
    )
    parser.add_argument("--only", default="", help="a package, or part of a feature's name")
    flags = parser.parse_args()
    python = environment(flags.venv)
    results = []
    with tempfile.TemporaryDirectory() as logs, gateway(flags.model, Path(logs)) as url:
        uses = [str(python), str(ROOT / "tools" / "client_uses.py"), url, KEY, Path(flags.model).name, flags.only]
        began = time.monotonic()
        with subprocess.Popen(uses, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                if line.startswith("{"):
                    results.append(result := json.loads(line))
                    print(
                        f"{result['package']}: {result['feature']}: {result['error'] or 'works'}",
                        file=sys.stderr,
                        flush=True,
                    )
    failed = sum(bool(result["error"]) for result in results)
    print(table(results))
    print(
        f"\n{len(results) - failed} of {len(results)} uses work ({time.strftime('%Y-%m-%d')}, {flags.model}, "
        f"{time.monotonic() - began:.0f} s)"
    )
    sys.exit(failed > 0 or not results)


if __name__ == "__main__":
    main()
