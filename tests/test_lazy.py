"""Names that are imported on first use: what is looked up loads its module, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forge_rl.system.lazy import LazyNames, public_names

ROOT = Path(__file__).parent.parent


def test_only_the_object_that_is_looked_up_is_imported():
    script = """
import sys
from forge_rl.system.lazy import LazyNames
names = LazyNames({"colours": "colorsys:rgb_to_hsv", "absent": "no_such_module:x"})
assert list(names) == ["colours", "absent"] and "absent" in names and len(names) == 2
print("colorsys" in sys.modules, names["colours"](1.0, 0.0, 0.0), "colorsys" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False (0.0, 1.0, 1.0) True\n"


def test_an_unknown_name_is_a_key_error_and_a_broken_one_is_not():
    names: LazyNames[object] = LazyNames({"moved": "forge_rl.errors:Nonsense"})
    with pytest.raises(KeyError):
        names["other"]
    with pytest.raises(AttributeError, match="Nonsense"):
        names["moved"]


def test_a_stub_says_where_each_public_name_of_a_package_is(tmp_path: Path):
    (tmp_path / "__init__.pyi").write_text(
        "from colorsys import hls_to_rgb as hls_to_rgb\nfrom colorsys import rgb_to_hls as rgb_to_hls\nversion: str\n"
    )
    names = public_names(str(tmp_path / "__init__.py"))
    assert names.places == {"hls_to_rgb": "colorsys:hls_to_rgb", "rgb_to_hls": "colorsys:rgb_to_hls"}


def test_each_package_with_a_stub_has_the_names_of_its_stub():
    stubs = list((ROOT / "forge_rl").rglob("__init__.pyi"))
    assert len(stubs) > 1
    for stub in stubs:
        names = public_names(str(stub.with_suffix(".py")))
        for name in names:
            assert names[name] is not None, f"{stub}: {name}"


def test_a_package_says_which_name_it_has_not():
    import forge_rl.gateway

    with pytest.raises(AttributeError, match=r"module 'forge_rl.gateway' has no attribute 'nonsense'"):
        forge_rl.gateway.nonsense  # noqa: B018
