"""lm-eval: which interpreter has it, what it is told, what is read of it, and what it never gets."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.context import with_longest_context
from forge_rl.errors import CheckpointError, ConfigError, ForgeError
from forge_rl.harness import lm_eval
from forge_rl.harness.lm_eval import Endpoint, LmEvalConfig, find_python, lm_eval_settings, run_lm_eval, scores_of
from forge_rl.services.generator import Generator
from tests.conftest import ROOT

PYTHON = sys.executable
PEER = """#!{python}
import json, os, sys, time
if sys.argv[1:2] == ["-c"]:
    print("{version}"); sys.exit()
assert sys.argv[1:5] == ["-m", "lm_eval", "run", "--config"], sys.argv
settings = json.load(open(sys.argv[5]))
print(os.getpid(), file=open(os.path.join(settings["output_path"], "pid"), "w"), flush=True)
say = lambda text: print(text, end="", file=sys.stderr, flush=True)
say("2026-01-01:00:00:00 WARNING  [api.task:1] no aggregation\\n")
say("2026-01-01:00:00:00 WARNING  [models.api_models:2] API request failed: \\x1b[2J\\n")
say("\\rRequesting API:   0%|          | 0/4 [00:00<?, ?it/s]\\rRequesting API:  50%|##")
say("##   | 2/4 [00:01<00:01, 2.0it/s]\\r100%|####| 4/4 [00:02<00:00, 2.0it/s]\\n")
if settings["tasks"] == ["sleep"]:
    time.sleep(1000)
if settings["tasks"] == ["none"]:
    say("ValueError: Tasks not found: \\x1b[2Jnone\\n"); sys.exit(1)
folder = os.path.join(settings["output_path"], "model")
os.mkdir(folder)
found = {{"results": {{}}, "variables": dict(os.environ), "arguments": sys.argv}}
json.dump(found, open(os.path.join(folder, "results_2026.json"), "w"))
"""


def peer(folder: Path, version: str = "0.4.13") -> Path:
    """An interpreter with an lm-eval that computes nothing."""
    python = folder / "python"
    python.write_text(PEER.format(python=PYTHON, version=version))
    python.chmod(0o700)
    return python


def run(python: Path, out: Path, task: str = "arc") -> tuple[dict[str, Any], list[tuple[str, int, int]], list[str]]:
    bars: list[tuple[str, int, int]] = []
    warnings: list[str] = []
    settings = {"tasks": [task], "output_path": str(out)}
    results = asyncio.run(
        run_lm_eval(python, settings, "the-key", progress=lambda *bar: bars.append(bar), tell=warnings.append)
    )
    return results, bars, warnings


def test_progress_and_problems_are_shown_and_the_key_is_its_only_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_API_KEY", "not for it")
    monkeypatch.setenv("OPENAI_API_KEY", "nor this")
    results, bars, warnings = run(peer(tmp_path), tmp_path / "out")
    assert bars == [("Requesting API", 0, 4), ("Requesting API", 2, 4), ("reading tasks", 4, 4)]
    assert warnings == [r"2026-01-01:00:00:00 WARNING  [models.api_models:2] API request failed: \x1b[2J"]
    assert results["variables"]["OPENAI_API_KEY"] == "the-key"
    assert "not for it" not in results["variables"].values()
    assert "the-key" not in " ".join(results["arguments"])
    assert "the-key" not in (tmp_path / "out" / "settings.json").read_text()
    assert b"no aggregation" in (tmp_path / "out" / "lm-eval.log").read_bytes()
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0


def test_a_failure_is_told_by_its_last_line(tmp_path: Path):
    with pytest.raises(ForgeError, match=r"ended with status 1: ValueError: Tasks not found: \\x1b\[2Jnone") as caught:
        run(peer(tmp_path), tmp_path / "out", "none")
    assert "lm-eval.log" in caught.value.hint


def test_a_full_disk_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forge_rl.harness.lm_eval.make_private", lambda *_, **__: None)  # refuses links
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lm-eval.log").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"cannot write .*out/lm-eval\.log: no space left"):
        run(peer(tmp_path), tmp_path / "out")
    monkeypatch.setattr("forge_rl.harness.lm_eval.write_whole", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(CheckpointError, match=r"cannot write .*out/settings\.json: no space left"):
        run(peer(tmp_path), tmp_path / "out")


async def test_it_ends_with_the_task_that_waits_for_it(tmp_path: Path):
    settings = {"tasks": ["sleep"], "output_path": str(tmp_path / "out")}
    started = asyncio.Event()
    working = asyncio.ensure_future(
        run_lm_eval(
            peer(tmp_path), settings, "", progress=lambda what, done, of: done == 4 and started.set(), tell=print
        )
    )
    await started.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "out" / "pid").read_text()), 0)


def test_the_interpreter_is_this_one_the_users_or_one_that_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    named = peer(tmp_path)
    assert find_python(str(named)) == (named, "0.4.13")
    with pytest.raises(ConfigError, match=r"has no lm-eval") as caught:
        find_python("/bin/sh")
    assert "/bin/sh -m pip install 'lm-eval[api]==" in caught.value.hint
    with pytest.raises(ConfigError, match=r"lm-eval 0\.4\.9, but 0\.4\.10 or later"):
        find_python(str(peer(tmp_path, "0.4.9")))
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(lm_eval, "_VERSION_S", 0.2)
        with pytest.raises(ConfigError, match=r"slow cannot say .*: no answer within 0\.2 s"):
            find_python(str(slow))
    requests: list[object] = []

    def made(requirements: object, *, python: str, flag: str) -> Path:
        requests.append((requirements, python, flag))
        return peer(tmp_path)

    monkeypatch.setattr(lm_eval, "interpreter", made)
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    assert find_python() == (named, "0.4.13")
    assert requests == [(lm_eval.PACKAGES, "", "--lm-eval-python PATH")]
    monkeypatch.setattr(sys, "executable", str(named))
    assert find_python() == (named, "0.4.13")
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("adds", "chat", "expected"), [(False, False, False), (True, False, True), (True, True, False)]
)
def test_prompts_go_as_token_ids_with_the_bos_that_lm_evals_own_model_has(
    tiny_model: Path, tmp_path: Path, adds: bool, chat: bool, expected: bool
):
    folder = tiny_model
    if adds:
        folder = tmp_path / "model"
        folder.mkdir()
        for file in tiny_model.iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "tokenizer.json").unlink()
        tokenizer = json.loads((tiny_model / "tokenizer.json").read_text())
        bos = next(token for token in tokenizer["added_tokens"] if token["content"] == "<|im_start|>")
        special = {"id": bos["content"], "ids": [bos["id"]], "tokens": [bos["content"]]}
        single = [{"SpecialToken": {"id": bos["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos["content"]: special},
        }
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    endpoint = Endpoint(
        url="http://127.0.0.1:1/v1", key="k", model="m", folder=folder, max_model_len=512, concurrent=256
    )
    config = LmEvalConfig(lm_eval=("arc_easy", "gsm8k"), limit=7, chat_template=chat, include_path=ROOT / "tests")
    settings = lm_eval_settings(config, endpoint, tmp_path)
    arguments = settings["model_args"]
    assert arguments["add_bos_token"] is expected
    assert (arguments["base_url"], arguments["tokenizer"]) == ("http://127.0.0.1:1/v1/completions", str(folder))
    assert (arguments["max_length"], arguments["num_concurrent"]) == (512, 64)
    assert (settings["tasks"], settings["limit"], settings["num_fewshot"]) == (["arc_easy", "gsm8k"], 7, None)
    assert (settings["apply_chat_template"], settings["include_path"]) == (chat, str(ROOT / "tests"))
    long = lm_eval_settings(config, replace(endpoint, max_model_len=1 << 20), tmp_path)["model_args"]["max_length"]
    assert 512 < long < 1 << 20, "what the gateway scores"


def test_the_context_is_as_long_as_model_and_memory_allow(tiny_model: Path, tmp_path: Path):
    read = json.loads((tiny_model / "config.json").read_text())

    def longest(positions: int, max_tokens: int | None = lm_eval.MOST_CONTEXT, **options: Any) -> int:
        (tmp_path / "config.json").write_text(json.dumps(read | {"max_position_embeddings": positions}))
        config = Generator.Config(**options)
        return with_longest_context(config, tmp_path, min_tokens=config.max_tokens, max_tokens=max_tokens).max_model_len

    assert longest(3000) == 3000
    assert longest(1 << 17) == 8192
    assert longest(1 << 17, max_model_len=512) == 512
    assert longest(1 << 17, None, kv_cache_gib=64) == 1 << 17, "as of the gateway"
    a = read_architecture(tiny_model)
    bytes_each = a.layers * 2 * a.head_dim * a.kv_heads * 4
    assert longest(1 << 17, kv_cache_gib=5000 * bytes_each / 2**30, dtype="float32") == 4096
    assert longest(512) == 512


def test_scores_are_named_by_metric_and_filter():
    results = {
        "mmlu": {"alias": "mmlu", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": 0.1},
        "gsm8k": {
            "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": "N/A",
            "exact_match,flexible-extract": 1,
            "exact_match_stderr,flexible-extract": 0.0,
        },
    }
    assert scores_of({"results": results}) == {
        "mmlu": {"acc": 0.5, "acc_stderr": 0.1},
        "gsm8k": {
            "exact_match (strict-match)": 0.25,
            "exact_match (flexible-extract)": 1.0,
            "exact_match (flexible-extract)_stderr": 0.0,
        },
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"limit": 0}, "--limit is 0"),
        ({"num_fewshot": -1}, "--num-fewshot is -1"),
        ({"include_path": Path("/nowhere")}, "/nowhere is not a folder"),
        ({"lm_eval": (), "live": True}, "--live requires --lm-eval"),
    ],
)
def test_wrong_flags_are_one_clear_message(flags: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        LmEvalConfig(**{"lm_eval": ("arc_easy",)} | flags)
    assert caught.value.hint
