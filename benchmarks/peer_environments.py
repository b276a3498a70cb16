"""Environments of the libraries that benchmarks compare with, each with its own Python and pinned packages."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import BenchmarkError

ROOT = Path(__file__).resolve().parents[1]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Used only if torch's CPU build is not found elsewhere."""
_SETUP_DEADLINE_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library with the packages of its environment.

    python = set_up(TRL)
    """

    name: str
    """Name for messages; in lower case, also the folder under .bench."""
    packages: tuple[str, ...]
    """Pinned packages, installed with their dependencies."""
    alone: tuple[str, ...] = ()
    """Pinned packages that are installed without their dependencies, of which `packages` has those that are needed."""

    @property
    def folder(self) -> Path:
        return ROOT / ".bench" / self.name.lower()


TRL = Peer(
    name="TRL",
    packages=("torch==2.13.0+cpu", "trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0"),
)
JUPYTER = Peer(name="Jupyter", packages=("ipykernel==7.4.0", "jupyter-client==8.10.0"))
VERL = Peer(
    name="verl",
    packages=(
        "torch==2.13.0+cpu",
        "transformers==5.9.0",
        "tensordict==0.10.0",
        "ray==2.60.0",
        "omegaconf==2.4.0",
        "codetiming==1.4.0",
        "datasets==5.2.0",
        "pillow==13.0.0",
        "numpy==2.3.5",
    ),
    alone=("verl==0.9.1",),
)
"""verl with what importing verl.workers.utils.losses needs."""
TINKER = Peer(
    name="tinker",
    packages=(
        "tinker==0.38.0",
        "torch==2.13.0+cpu",
        "transformers==5.24.0",
        "datasets==5.2.0",
        "aiohttp==3.14.5",
        "blobfile==3.3.0",
        "chz==0.4.0",
        "cloudpickle==3.1.3",
        "pillow==13.0.0",
        "pyrage==1.4.0",
        "termcolor==3.3.0",
        "tiktoken==0.14.0",
        "tqdm==4.70.1",
    ),
    alone=("tinker-cookbook==0.6.1",),
)
"""tinker's client, and its cookbook with what its loops need; its renderers of other models are not among that."""

MINI_SWE = Peer(name="mini-swe-agent", packages=("mini-swe-agent==2.4.6", "litellm==1.110.2"))


def set_up(peer: Peer) -> Path:
    """Create a peer's environment, unless it exists with exactly these packages.

    Returns:
        Its Python.

    Raises:
        BenchmarkError: it cannot be created.
    """
    folder, name = peer.folder, peer.name
    python, record = folder / "bin" / "python", folder / "installed.json"
    packages = json.dumps([*peer.packages, *peer.alone])
    with contextlib.suppress(OSError):
        if record.read_text() == packages and python.exists():
            return python
    print(f"installing {name} into .bench/{folder.name} (once; minutes)", flush=True)
    hint = "look at the lines above; the benchmark has no number without its peer"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=_SETUP_DEADLINE_S)
        _install(python, peer.packages)
        if peer.alone:
            _install(python, ("--no-deps", *peer.alone))
        # Written last: an installation that breaks off is made again.
        record.write_text(packages)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{name} was not installed within {_SETUP_DEADLINE_S:.0f} s", hint=hint) from error
    except subprocess.CalledProcessError as error:
        raise BenchmarkError(f"{name} cannot be installed: exit status {error.returncode}", hint=hint) from error
    except OSError as error:
        raise BenchmarkError(f"{name} cannot be installed: {error}", hint=hint) from error
    return python


def _install(python: Path, packages: tuple[str, ...]) -> None:
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    # pip finds torch's CPU build in PIP_FIND_LINKS, if set; otherwise only torch's own index has it.
    first = subprocess.run(pip, check=False, timeout=_SETUP_DEADLINE_S, capture_output=True, text=True)
    if first.returncode != 0:
        print(first.stderr, file=sys.stderr, end="")
        print(f"trying again with {TORCH_INDEX}", flush=True)
        subprocess.run([*pip, "--extra-index-url", TORCH_INDEX], check=True, timeout=_SETUP_DEADLINE_S)
