"""Speculation: the flag, which drafts are made and when, and that they change no token. Sampling: test_sampling."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_rl.engines.speculation import (
    DraftSwitch,
    Speculation,
    check_speculation,
    read_speculation,
    resolve_draft_model,
)
from forge_rl.engines.vllm.suffixes import AnswerIndex, Guide, SuffixIndex
from forge_rl.errors import ConfigError, ModelError
from forge_rl.metrics.episode_reader import EpisodeFile
from forge_rl.models.bundled import default_cache
from tests.commands import Command, metrics, tiny_run
from tests.fakes import make_model
from tests.seeded_answers import EAGER, seeded_answers
from tests.tiny import bundled_folder, make_tiny_model

SETTINGS = Speculation(kind="suffix", max_tokens=4, max_running=2, min_accepted=0.5, adaptive=False)


def test_the_flag_names_a_kind_and_its_options() -> None:
    assert read_speculation("off") is None
    assert read_speculation("ngram") == Speculation(kind="ngram", max_tokens=8, max_running=8, min_accepted=0.3)
    assert read_speculation("suffix:max_tokens=4,max_running=2,min_accepted=0.5,adaptive=false") == SETTINGS
    speculation = read_speculation("draft:org/model,max_tokens=4")
    assert speculation == Speculation(kind="draft", model="org/model", max_tokens=4)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sufix", "unknown kind 'sufix'"),
        ("draft", "draft names no model"),
        ("draft:max_tokens=4", "draft names no model"),
        ("suffix:some/model", "suffix does not take this"),
        ("off:max_tokens=4", "off does not take this"),
        ("suffix:tokens=4", "no option 'tokens'"),
        ("suffix:max_tokens=0", "max_tokens is 0"),
        ("suffix:min_accepted=1.5", "min_accepted is 1.5"),
    ],
)
def test_a_wrong_flag_is_a_config_error(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_speculation(text)


def test_speculation_is_refused_where_it_does_not_work() -> None:
    check_speculation("off", routed_experts=True, devices=2)
    check_speculation("suffix", routed_experts=False, devices=2)
    with pytest.raises(ConfigError, match="router-replay"):
        check_speculation("suffix", routed_experts=True, devices=1)
    with pytest.raises(ConfigError, match="runs on one device, and an engine has 2"):
        check_speculation("draft:some/model", routed_experts=False, devices=2)


def test_a_draft_model_is_found_and_must_have_the_tokenizer_of_the_policy(tmp_path: Path) -> None:
    policy = bundled_folder()
    assert resolve_draft_model("suffix", policy, tmp_path) == "suffix"
    speculation = read_speculation(resolve_draft_model("draft:smollm2-135m,max_tokens=3", policy, default_cache()))
    assert speculation == Speculation(kind="draft", model=str(policy.resolve()), max_tokens=3)
    other = tmp_path / "it's, another"
    make_model(other)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(policy / name, other)
    speculation = read_speculation(resolve_draft_model(f'draft:"{other}"', other, tmp_path))
    assert speculation == Speculation(kind="draft", model=str(other))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["!"], tokenizer["model"]["vocab"]["#"] = (
        tokenizer["model"]["vocab"][letter] for letter in "#!"
    )
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"the draft model .* has another tokenizer than the policy: 2 tokens differ"):
        resolve_draft_model(f'draft:"{other}"', policy, tmp_path)
    with pytest.raises(ModelError, match="the draft model /nowhere/at/all: no such folder"):
        resolve_draft_model("draft:/nowhere/at/all", policy, tmp_path)


def write(index: SuffixIndex, tokens: list[int], key: int = 0) -> int:
    end = -1
    for token in tokens:
        end = index.append(token, key=key, end=end)
    return end


def test_a_draft_is_what_followed_the_longest_match_until_votes_split() -> None:
    index = SuffixIndex(256)
    write(index, list(range(10, 40)))
    end = write(index, list(range(15, 25)))
    # One place, a match of 10: 10/12 * 11/13 * ... * 19/21 = 10 * 11 / (20 * 21) = 0.26, and times 20/22 = 0.24.
    assert index.draft(end, key=0, max_tokens=16) == list(range(25, 35))
    assert index.draft(end, key=0, max_tokens=2) == [25, 26]
    assert index.draft(end, key=1, max_tokens=16) == [], "of another task"
    assert index.draft(write(index, [24, 25, 27]), key=0, max_tokens=16) == []
    write(index, [5, 6, 7, 8])
    write(index, [5, 6, 7, 9])
    assert index.draft(write(index, [5, 6, 7]), key=0, max_tokens=16) == [9]  # 3/(6+2), the later place first
    for other in (11, 12, 13):
        write(index, [5, 6, 7, other])
    assert index.draft(write(index, [5, 6, 7]), key=0, max_tokens=16) == [], "3/(15+2) is too unlikely"


def test_the_index_keeps_its_size_and_only_the_latest_tokens() -> None:
    drawn = random.Random(0)
    index, texts = SuffixIndex(64), list[list[int]]()
    for _ in range(200):
        texts.append([drawn.randrange(3) for _ in range(drawn.randrange(1, 40))])
        end = write(index, texts[-1])
        recent = [token for text in texts for token in text][-64:]
        # With three different tokens nearly everything matches; nothing that was overwritten may be followed.
        assert index.tail(end, 100) == texts[-1][-64:][::-1]
        assert set(index.draft(end, key=0, max_tokens=8)) <= set(recent)
    assert {len(index._tokens), *(len(ending._last) for ending in index._endings)} == {64}


def test_places_where_more_recurs_are_found_among_many_that_look_alike() -> None:
    index = SuffixIndex(1 << 10)
    long = list(range(100, 110))
    write(index, [*long, 1, 2, 3, 50, 51])
    for other in range(20):  # more than are compared
        write(index, [1, 2, 3, 60 + other])
    assert index.draft(write(index, [1, 2, 3]), key=0, max_tokens=2) == [], "all of the last 16 go on differently"
    assert index.draft(write(index, [*long, 1, 2, 3]), key=0, max_tokens=2) == [50, 51]


def test_what_stood_in_place_of_a_siblings_tokens_stands_there_again() -> None:
    index, guide = SuffixIndex(256), Guide()
    write(index, [*range(10, 20), 1, 2, 3, *range(20, 25), 1, 2, *range(25, 30), 1, 2, 4, 1, 2, 3, 40, 1, 2, 41])
    end = write(index, list(range(10, 20)))
    assert index.draft(end, key=0, max_tokens=3, guide=guide) == [1, 2, 3]
    for token in (1, 7, 8, *range(20, 25), 1, 9, *range(25, 30)):  # here 2 is 7 and then 9, and 3 is 8
        index.pass_by(guide, token)
        end = index.append(token, key=0, end=end)
    assert index.draft(end, key=0, max_tokens=9, guide=guide) == [1, 9, 4, 1, 9, 8, 40, 1, 9]


def test_a_sibling_still_guides_after_tokens_that_differ_until_too_many_do() -> None:
    index, prompt, sibling = AnswerIndex(1 << 12), [1, 2], list(range(100, 200))

    def drafts(request: str, answer: list[int]) -> list[list[int]]:
        """Follow a request token by token; returns the draft after each."""
        drafts_of_steps = []
        for end in range(1, len(answer) + 1):
            index.follow(request, np.array([*prompt, *answer[:end]], np.int32), len(prompt))
            drafts_of_steps.append(index.draft(request, 4))
        return drafts_of_steps

    assert not any(drafts("sibling", sibling))
    answer = list(sibling)
    answer[30] = 7
    sibling_drafts = drafts("other", answer)
    assert sibling_drafts[20] == sibling[21:25]
    assert sibling_drafts[30:33] == [sibling[start : start + 4] for start in (31, 32, 33)], (
        "although no three tokens recur"
    )
    wrong = [token if position < 30 else position for position, token in enumerate(sibling)]
    sibling_drafts = drafts("lost", wrong)
    assert sibling_drafts[30] == sibling[31:35]
    assert not any(sibling_drafts[49:]), "of the last 24 tokens fewer than 6 were right"
    end = drafts("longer", [*sibling, 8, 9])
    assert end[-3:] == [[], [], []], "the sibling has ended"


def test_drafts_come_from_siblings_and_later_turns_of_the_same_task() -> None:
    index = AnswerIndex(1 << 12)
    prompt, answer = list(range(100, 120)), list(range(200, 240))

    def follow(request: str, *parts: list[int], prompt_tokens: int) -> list[int]:
        index.follow(request, np.array([token for part in parts for token in part], np.int32), prompt_tokens)
        return index.draft(request, 4)

    assert follow("a", prompt, answer[:10], prompt_tokens=20) == []
    assert follow("a", prompt, answer, prompt_tokens=20) == []
    assert follow("sibling", prompt, answer[:10], prompt_tokens=20) == answer[10:14]
    assert follow("later turn", prompt, answer[:3], [7, 8], answer[:10], prompt_tokens=25) == answer[10:14]
    assert follow("other", [1, *prompt], answer[:10], prompt_tokens=21) == []
    assert follow("copies its prompt", prompt[:2], prompt_tokens=2) == []


def test_drafts_are_off_with_many_running_and_while_few_are_accepted() -> None:
    switch = DraftSwitch(SETTINGS, lambda: 0.0)
    assert (switch.allows("ab", 2), switch.allows("abc", 3)) == (True, False)
    for _ in range(16):
        switch.note(4, 1)
    assert [switch.allows("a", 1) for _ in range(64)].count(True) == 2, "only to measure again"
    for _ in range(32):
        switch.note(4, 4)
    assert switch.allows("a", 1)


def test_drafts_are_off_where_they_yield_fewer_tokens_a_second() -> None:
    """A step takes 10 ms; drafting 15 more, while two run, and none while one does. Drafts add a token a request."""
    now = 0.0
    switch = DraftSwitch(replace(SETTINGS, adaptive=True, min_accepted=0.0), lambda: now)

    def drafting(running: str, cost_s: float, steps: int) -> int:
        nonlocal now
        count = 0
        is_allowed = switch.allows(running, len(running))
        for step in range(steps):
            now += 0.01 + is_allowed * cost_s + (100 if step == steps // 2 else 0)  # a pause: no step's time
            is_allowed = switch.allows(running, len(running) * (1 + is_allowed))
            count += is_allowed
        return count

    assert drafting("ab", 0.015, 320) < 64, "off once both are known, but for every 32nd step"
    assert drafting("ab", 0.015, 320) == 10
    assert drafting("a", 0.0, 320) > 256, "other numbers of running requests have speeds of their own"
    assert drafting("ab", 0.005, 1600) > 400, "on again once it pays"


@pytest.mark.processes  # importing vLLM takes as long as starting some
def test_the_drafter_counts_what_was_accepted_and_keeps_within_the_context() -> None:
    from forge_rl.engines.vllm.drafting import Drafter

    device = SimpleNamespace(device_type="cpu")
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=32), device_config=device)
    drafter = Drafter(config)
    tokens = np.zeros((3, 32), np.int32)
    lengths = np.array([20, 13, 9])
    assert drafter.propose([[1], [2], []], lengths, tokens) == [[], [], []], "not bound yet"
    batch = SimpleNamespace(req_ids=["a", "b", "c"], num_prompt_tokens=np.array([4, 4, 9]))
    runner: Any = SimpleNamespace(drafter=drafter, input_batch=batch, effective_drafter_max_model_len=32)
    settings = Speculation(kind="suffix", max_tokens=4, max_running=3, min_accepted=0.5, adaptive=False)
    drafter.bind(runner, settings)
    tokens[0, :20] = [1, 2, 3, 4, *range(10, 26)]
    tokens[1, :13] = tokens[0, :13]
    assert drafter.propose([[1], [2], []], lengths, tokens) == [[], list(tokens[0, 13:17]), []]
    tokens[1, :16] = [*tokens[0, :15], 99]
    drafter.propose([[1], [14, 15, 99], []], np.array([20, 16, 9]), tokens)
    assert (drafter._switch._drafted, drafter._switch._accepted) == (4, 2)
    tokens[0, :31] = [1, 2, 3, 4, *range(10, 27), *range(10, 20)]
    lengths = np.array([31, 16, 9])
    assert drafter.propose([[1], [], []], lengths, tokens)[0] == [], "the context ends with the next token"


@pytest.mark.processes  # importing vLLM takes as long as starting some
@pytest.mark.parametrize(("top_k", "top_p"), [(3, None), (None, 0.5), (3, 0.5)])
def test_a_step_without_drafts_takes_top_k_and_top_p(top_k: int | None, top_p: float | None) -> None:
    from vllm.v1.sample import rejection_sampler

    from forge_rl.engines.vllm import internals
    from forge_rl.engines.vllm.cpu_rejection import run_without_kernels

    run_without_kernels()
    internals.accept_no_drafts()
    metadata: Any = SimpleNamespace(
        all_greedy=False,
        temperature=torch.full((2,), 1.0),
        top_k=None if top_k is None else torch.full((2,), top_k),
        top_p=None if top_p is None else torch.full((2,), top_p),
    )
    ends = torch.zeros(2, dtype=torch.int32)
    constrained_logits = rejection_sampler.apply_sampling_constraints(torch.zeros(0, 5), ends, metadata)
    assert constrained_logits.shape == (0, 5)


@pytest.fixture(scope="module")
def undrafted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model, and its seeded answers without drafts."""
    model = make_tiny_model(tmp_path_factory.mktemp("sharp") / "model", bundled_folder(), tied=False)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] *= 60  # a draft model writes only what is likely
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model, seeded_answers(model, "off")


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it for CUDA")
@pytest.mark.parametrize("kind", [pytest.param("ngram:", marks=pytest.mark.nightly), "suffix:", "draft:{},"])
def test_a_seed_gives_the_same_tokens_with_and_without_drafts(
    kind: str, undrafted: tuple[Path, dict[str, Any]]
) -> None:
    model, plain = undrafted
    drafting = seeded_answers(model, kind.format(model) + EAGER)
    assert plain["drafted"] == 0 < drafting["drafted"]
    assert plain["answers"] == drafting["answers"]
    assert plain["rest"] == drafting["rest"] == plain["answers"][3][20:]
    assert len({tuple(answer) for answer in plain["answers"]}) > 4


@pytest.mark.nightly
def test_a_run_drafts_and_has_the_episodes_of_one_without_drafts(
    commands: list[Command], tiny_model: Path, tmp_path: Path
) -> None:
    answers = []
    for speculation in ("off", f"suffix:{EAGER}"):
        out = tmp_path / speculation[:3]
        # Colder, a random model repeats itself.
        flags = {"temperature": "0.1", "max-tokens": "48", "dtype": "float32", "speculation": speculation}
        arguments = [text for name, value in flags.items() for text in (f"--generator.{name}", value)]
        frozen = ("--trainer.optimizer.lr", "1e-12", "--evaluation.every", "0", "--checkpoint-every", "0")
        run = tiny_run(commands, tiny_model, out, *arguments, *frozen, "--steps", "2", "--schedule.max-lag", "0")
        assert run.end(400) == 0, run.output
        files = [EpisodeFile(path) for path in sorted((out / "episodes").glob("*-trained.parquet"))]
        episodes = [record.episode for file in files for record in file]
        answers.append([turn.token_ids.tolist() for episode in episodes for turn in episode.turns])
        assert sum(row.get("rollout/drafted", 0) for row in metrics(out)) > 0 if speculation != "off" else True
    assert answers[0] == answers[1]
    assert len(answers[0]) == 16
    assert len({tuple(ids) for ids in answers[0]}) > 4, "siblings differ"


@pytest.mark.nightly
def test_the_benchmark_runs(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.speculation", "--smoke", "--json", str(path)]
    subprocess.run(command, check=True, timeout=600)
    report = json.loads(path.read_text())
    assert {"tail_speedup", "step_speedup"} <= set(report["results"])
    assert report["results"]["equal_episodes"] == 1
    assert {row["engine"] for row in report["rows"] if row["drafted"]} == {"drafted"}
