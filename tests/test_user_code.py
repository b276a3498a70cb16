"""Code of a user's own: found by a flag's text, run anew when it changes, sent with its code, refused in one line."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from forge_rl.errors import ConfigError
from forge_rl.flags.user_code import load, send_modules


def test_a_files_function_loads_its_imports_and_reloads_on_change(tmp_path: Path):
    (tmp_path / "beside_it.py").write_text("WORTH = 2.0")
    file = tmp_path / "mine.py"
    file.write_text("from beside_it import WORTH\n\nclass A:\n    def score(task, text): return WORTH\n")
    score = load(f"{file}:A.score", "--reward")
    assert score(None, "") == 2.0  # type: ignore[operator]
    assert load(f"{file}:A.score", "--reward") is score
    file.write_text("class A:\n    def score(task, text): return 5.0\n")
    assert load(f"{file}:A.score", "--reward")(None, "") == 5.0  # type: ignore[operator]
    assert load("math:sqrt", "--reward")(9.0) == 3.0  # type: ignore[operator]


def test_a_files_function_reaches_a_process_that_does_not_know_the_file(tmp_path: Path):
    import cloudpickle

    file = tmp_path / "mine.py"
    file.write_text("WORTH = 2.0\n\ndef score(task, text): return WORTH * len(text)\n")
    pickle_bytes = cloudpickle.dumps(load(f"{file}:score", "--reward"))
    file.unlink()
    command = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())(None, 'abc'))"
    done = subprocess.run([sys.executable, "-c", command], input=pickle_bytes, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "6.0"
    assert pickle.loads(pickle_bytes)(None, "a") == 2.0


def test_what_it_imports_reaches_a_process_that_lacks_those_files_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import cloudpickle

    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "its_helper.py").write_text("import json\n\ndef worth(text): return json.loads(text) * 2\n")
    (tmp_path / "mine.py").write_text("import its_helper\n\ndef score(task, text): return its_helper.worth(text)\n")
    score = load(f"{tmp_path / 'mine.py'}:score", "--reward")
    before = set(cloudpickle.list_registry_pickle_by_value())
    send_modules()
    try:
        pickle_bytes = cloudpickle.dumps(score)
        added = set(cloudpickle.list_registry_pickle_by_value()) - before
    finally:
        for name in added:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])
        del sys.modules["its_helper"]
    assert "its_helper" in added
    assert not {name for name in added if name.partition(".")[0] in ("forge_rl", "json", "torch", "pytest")}
    command = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())(None, '3'))"
    done = subprocess.run([sys.executable, "-c", command], input=pickle_bytes, capture_output=True, check=True, cwd="/")
    assert done.stdout.decode().strip() == "6"


@pytest.mark.parametrize(
    ("source", "text", "message"),
    [
        ("", "absent.py:score", "--reward absent.py: No such file"),
        ("", "mine.py", "--reward mine.py: no name"),
        ("def scored(): ...", "mine.py:score", "mine.py has no score\n  hint: it defines scored"),
        ("def score(:", "mine.py:score", r"mine.py cannot be imported: SyntaxError: .* \(.*mine.py:1\)"),
        ("x = 1\n1 / 0", "mine.py:score", r"ZeroDivisionError: division by zero \(.*mine.py:2\)"),
        ("import absent_module", "mine.py:score", "No module named 'absent_module'"),
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['--score'])",
            "mine.py:score",
            r"mine.py ends the program with 2 when it is imported \(.*mine.py:2\)\n  hint: call its main",
        ),
        ("raise SystemExit('no')", "leaving:score", r"leaving ends the program with 'no' .*leaving.py:1"),
        ("", "absent_module:score", "there is no module absent_module"),
        ("", "json.absent:score", "there is no module json.absent"),
    ],
)
def test_what_cannot_be_found_is_said_in_one_line(source: str, text: str, message: str, users_folder: Path):
    for name in ("mine.py", "leaving.py"):
        (users_folder / name).write_text(source)
    with pytest.raises(ConfigError, match=message):
        load(text, "--reward")
