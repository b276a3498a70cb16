"""Models by hub id: a local stand-in of the hub's API, the real client, and what a user is told."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forge_rl.errors import ModelError
from forge_rl.models.adapters import Adapter, name_base, write_adapter
from forge_rl.models.digests import model_digests
from forge_rl.models.hf_folder import RECORD
from forge_rl.models.hub import CARD, is_hub_model
from forge_rl.models.resolve import resolve_model
from forge_rl.run.records import started_from
from forge_rl.run.records.json_files import write_json
from forge_rl.run.records.model_card import write_card
from forge_rl.run.records.started_from import ModelKeeper
from tests.hub_server import COMMITS, Hub, serving
from tests.zoo.folders import write

_RESOLVE = """
import os, sys
from pathlib import Path
from forge_rl.errors import ForgeError
from forge_rl.models.resolve import resolve_model
for name in sys.argv[1:]:
    shares = []
    try:
        folder = resolve_model(name, Path(os.environ["HF_HOME"], "merged"), lambda step, share: shares.append(share))
        print("folder", folder, len(shares) > 1 and min(shares) > 0, max(shares, default=0))
    except ForgeError as error:
        print("error", str(error).replace("\\n", " "))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write("Qwen/Qwen3-0.6B", tmp_path / "hf")
    (folder / "pytorch_model.bin").write_text("a pickle")
    return folder


def python(hub: Hub, home: Path, *arguments: str, **variables: str) -> list[str]:
    """Run Python with the hub's address; returns the lines of its output."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": "", **variables}
    ended = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert not ended.returncode, ended.stderr[-3000:] + ended.stdout[-1000:]
    return ended.stdout.splitlines()


def test_models_come_from_the_hub_by_revision_and_then_from_the_cache(model: Path, tmp_path: Path):
    names = ["org/name@v1", "org/name", "org/name@other", "org/absent"]
    with serving(Hub({"org/name": model})) as hub:
        by_tag, main, other, absent = python(hub, tmp_path / "home", "-c", _RESOLVE, *names)
        assert f"snapshots/{COMMITS['v1']} True 1.0" in by_tag
        assert f"snapshots/{COMMITS['main']}" in main
        assert "it has no such revision" in other
        assert "the model does not exist or is private" in absent
        assert not any("pytorch_model.bin" in request for request in hub.requests)
        hub.requests.clear()
        (cut_short,) = (tmp_path / "home").rglob(f"snapshots/{COMMITS['main']}/config.json")
        cut_short.unlink()
        names = ["org/name@v1", "org/other", "org/name"]
        lines = python(hub, tmp_path / "home", "-c", _RESOLVE, *names, HF_HUB_OFFLINE="1")
        assert COMMITS["v1"] in lines[0]
        assert "the hub cannot be reached, and the model is not in its cache" in lines[1]
        assert "the hub cannot be reached, and the cache has only a part of it" in lines[2]
        assert not hub.requests


def test_an_adapter_that_was_pushed_is_a_model_by_its_id(model: Path, tmp_path: Path):
    weights, name = load_file(model / "model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    rows, columns = weights[name].shape
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    factors = {name: (torch.ones(1, columns), torch.ones(rows, 1))}
    write_adapter(adapter, factors, base=model, alpha=1.0, rslora=False, dropout=0.0)
    name_base(adapter, Path("org/name"))
    with serving(Hub({"org/name": model, "me/adapter": adapter})) as hub:
        (line,) = python(hub, tmp_path / "home", "-c", _RESOLVE, "me/adapter")
    assert line.startswith("folder"), line
    merged = load_file(Path(line.split()[1]) / "model.safetensors")
    assert {key for key in weights if not merged[key].equal(weights[key])} == {name}


def test_what_the_hub_answers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    with serving(Hub({}, status=403)) as hub:
        (line,) = python(hub, tmp_path / "home", "-c", _RESOLVE, "org/name")
    assert "the hub answers with status 403: not with this token" in line
    assert "HF_TOKEN" in line

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("Data processing error: no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    with pytest.raises(ModelError, match="cannot get 'org/name' from the hub: Data processing error: no route"):
        resolve_model("org/name", tmp_path)


def test_a_gated_model_needs_a_token_and_an_interrupted_download_goes_on(model: Path, tmp_path: Path):
    (model / "large.txt").write_bytes(os.urandom(16 << 20))  # the client writes pieces of 10 MiB
    with serving(Hub({"org/name": model}, token="hf_secret", breaks_after=12 << 20)) as hub:
        (gated,) = python(hub, tmp_path / "home", "-c", _RESOLVE, "org/name")
        assert "access to it is gated" in gated
        assert "HF_TOKEN" in gated
        (line,) = python(hub, tmp_path / "home", "-c", _RESOLVE, "org/name", HF_TOKEN="hf_secret")
        assert COMMITS["main"] in line
        ranges = [request.rpartition("=")[2] for request in hub.requests if "large.txt bytes=" in request]
        assert ranges
        assert int(ranges[0].rstrip("-")) > 0
    (snapshot,) = (tmp_path / "home").rglob("snapshots/*/large.txt")
    assert snapshot.read_bytes() == (model / "large.txt").read_bytes()


def test_a_run_is_pushed_with_card_and_record(model: Path, tmp_path: Path):
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-000002" / "model"
    checkpoint.parent.mkdir(parents=True)
    model.rename(checkpoint)
    flags = {"model": "Qwen/Qwen3-0.6B@main", "tasks": ["chain_sum|<b>"], "out": "/home/me/secret", "steps": 2}
    (run / "config.json").write_text(json.dumps(flags))
    (run / "versions.json").write_text(json.dumps({"torch": "2.13"}))
    write_card(checkpoint, run, step=2, scores={0: 0.25, 2: 0.5, 3: 0.9})
    names = {path.name for path in checkpoint.iterdir()} - {"pytorch_model.bin"}
    for private in ("notes/keys.json", ".keys.json", "keys.env"):
        (checkpoint / private).parent.mkdir(exist_ok=True)
        (checkpoint / private).write_text("{}")
    with serving(Hub({}, token="hf_secret")) as hub:
        command = ("-m", "apps.push", str(run), "me/model", "--private")
        assert any(hub.url in line for line in python(hub, tmp_path / "home", *command, HF_TOKEN="hf_secret"))
    assert hub.uploads.keys() == names
    assert hub.uploads["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    record, card = json.loads(hub.uploads[RECORD]), hub.uploads[CARD].decode()
    assert record["scores"] == {"0": 0.25, "2": 0.5}
    assert record["data"] == {"tasks": ["chain_sum|<b>"]}
    assert "secret" not in json.dumps(record)
    assert 'base_model: "Qwen/Qwen3-0.6B"\n' in card
    assert "| 2 | 0.5 |" in card
    assert "<b>" not in card


def test_a_resumed_run_fetches_the_commit_that_it_began_with(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    newer = tmp_path / "snapshots" / COMMITS["main"]
    shutil.copytree(model, newer)
    (newer / "config.json").write_text("{}")
    began = tmp_path / "other machine" / "snapshots" / COMMITS["v1"]
    write_json(
        tmp_path / "models.json",
        {"--model": {"name": "org/name", "folder": str(began), "files": model_digests(model)}},
    )
    fetched_names, lines = list[str](), list[str]()

    def download(name: str) -> Path:
        fetched_names.append(name)
        return model

    monkeypatch.setattr(started_from, "download", download)
    keeper = ModelKeeper(run=tmp_path, resumes=True, force=False, tell=lines.append)
    assert keeper.keep("--model", "org/name", newer, weights=True) == model
    assert fetched_names == [f"org/name@{COMMITS['v1']}"]
    assert "the run keeps" in lines[0]


def test_folders_near_a_model_are_refused_with_a_way_there(tmp_path: Path):
    repository, outputs = tmp_path / "models--org--name", tmp_path / "outputs"
    snapshot, saved = repository / "snapshots" / "5e1c", outputs / "checkpoint-500"
    snapshot.mkdir(parents=True)
    saved.mkdir(parents=True)
    (saved / "adapter_config.json").write_text("{}")
    hints = {repository: f"such as {snapshot}", snapshot: "start again with a network", outputs: f"such as {saved}"}
    for folder, hint in hints.items():
        with pytest.raises(ModelError, match="is not a complete model") as refused:
            resolve_model(str(folder), tmp_path)
        assert hint in refused.value.hint


def test_only_ids_with_a_plain_revision_are_names_of_the_hub():
    assert is_hub_model("org/name")
    assert is_hub_model("org/name@refs/pr/1")
    assert not any(map(is_hub_model, ("name", "org/name@", "org/name@a b", "../name", "org/name@../x/@")))


async def test_a_card_that_links_out_of_the_folder_is_not_pushed(tmp_path: Path):
    from apps.push import Config, main

    (tmp_path / "secret").write_text("a key")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / CARD).symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match=f"{CARD} links out of the model's folder"):
        await main(Config(run=tmp_path / "model", repo="me/model"))


def test_what_environment_variables_hold_as_secrets_is_not_in_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEARCH_API_KEY", "k-0123456789")
    flags = {
        "model": "org/name",
        "env": "mcp",
        "world": {"command": "serve --with k-0123456789"},
        "rewards": "k-0123456789",
    }
    (tmp_path / "config.json").write_text(json.dumps(flags))
    write_card(tmp_path, tmp_path, step=1, scores={})
    texts = (tmp_path / RECORD).read_text(), (tmp_path / CARD).read_text()
    assert json.loads(texts[0])["flags"]["world"] == {"command": "serve --with ***"}
    assert not any("k-0123456789" in text for text in texts)


def test_a_pushed_adapter_names_its_base_as_the_hub_does(tmp_path: Path):
    from apps.push import with_named_base

    folder, work = tmp_path / "model", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    base = f"/home/me/.cache/models--org--name/snapshots/{COMMITS['v1']}"
    config = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 8, "lora_alpha": 16}
    contents = {
        "adapter_config.json": config,
        "base_model.json": {"folder": base, "files": {"a.safetensors": "1"}},
        RECORD: {"base_model": "org/name@v1"},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    files = [folder / name for name in contents]
    assert with_named_base(folder, files, work) == (work, [work / name for name in contents])
    adapter = Adapter.read(work)
    assert (adapter.base, adapter.revision) == ("org/name", COMMITS["v1"])
    assert adapter.digests == {"a.safetensors": "1"}
    assert "/home/me" not in "".join(path.read_text() for path in work.iterdir())
    (folder / RECORD).write_text(json.dumps({"base_model": "smollm2-135m"}))
    assert with_named_base(folder, files, work) == (folder, files)


def test_a_folder_without_a_model_is_not_pushed(tmp_path: Path):
    from apps.push import find_trained

    with pytest.raises(ModelError, match="holds no model"):
        find_trained(tmp_path)
