"""Teachers: which one scores which episode, where its scores go, and what happens to those that fail."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge_rl.algorithms.distillation import Distillation
from forge_rl.errors import ConfigError, ReplicaError, ServiceError
from forge_rl.models.bundled import bundled_model, default_cache
from forge_rl.services.completion import validate_scores
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.teachers import POLICY, Teachers, TeachersConfig, build_teachers, check_same_tokens
from forge_rl.token_arrays import ScoredTokens
from forge_rl.types import Batch, Episode, Group, Task, Turn
from tests.fakes import batch_of

VOCAB = 1000


class Scorer:
    """Scores each token by what comes before it: minus the sum of ids. Fails for tokens in `refuses`."""

    def __init__(self, refuses: tuple[int, ...] = (), beyond: int = -1) -> None:
        self.config = GeneratorConfig()
        self.tokenizer = SimpleNamespace(vocab_size=VOCAB)
        self.refuses, self.beyond = refuses, beyond
        self.asked: list[list[int]] = []

    async def score(self, prompt_ids: Any, token_ids: Any, *, temperature: float, top_k: int) -> ScoredTokens:
        await asyncio.sleep(0)
        ids = [*map(int, prompt_ids), *map(int, token_ids)]
        self.asked.append(ids)
        if set(self.refuses) & set(ids):
            raise ReplicaError("it died", service="teacher")
        sums = np.cumsum(ids)[len(prompt_ids) - 1 : -1]
        top = np.array(token_ids)[:, None] + np.arange(top_k)[None, :]
        top[np.array(token_ids) == self.beyond] = VOCAB
        return ScoredTokens(logprobs=-sums / temperature, top_ids=top, top_logprobs=np.broadcast_to(-1.0, top.shape))


def score(teachers: Teachers, batch: Batch, **settings: Any) -> Any:
    return asyncio.run(teachers.score(batch, **{"temperature": 1.0, **settings}))


def teachers_of(scorer: Scorer, **by_source: Scorer) -> Teachers:
    models = {"": POLICY} | {source: source for source in by_source}
    return Teachers(scorer, models, by_source)  # type: ignore[arg-type]


TURNS = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])]
"""Two turns of one segment."""
REWRITTEN = [([1, 2], [3, 4]), ([9, 9], [6])]
"""Two segments, the second with another history."""


def test_scores_are_in_the_order_of_the_turns():
    batch = batch_of([(0.0, TURNS), (1.0, REWRITTEN)])
    found = score(teachers_of(scorer := Scorer()), batch, temperature=2.0, top_k=2)
    assert sorted(scorer.asked) == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [9, 9, 6]]
    ((first, second),) = found.logprobs
    assert first.tolist() == [-1.5, -3.0, -7.5]
    assert second.tolist() == [-1.5, -3.0, -9.0]
    assert found.top_ids[0][0].tolist() == [[3, 4], [4, 5], [6, 7]]
    assert found.top_logprobs[0][0].shape == (3, 2)
    assert found.columns(Distillation(k=2)) == {"top_ids": found.top_ids, "top_teacher": found.top_logprobs}
    policy = np.concatenate([turn.logprobs for episode in batch.episodes for turn in episode.turns])
    kl = float(np.mean(policy.astype(np.float64) - np.concatenate([first, second])))
    assert found.metrics(batch) == {"teacher/failed": 0, "teacher/unhinted": 0, "teacher/kl": pytest.approx(kl)}


def test_another_prompt_replaces_the_first_one_alone():
    batch = batch_of([(0.0, TURNS), (1.0, REWRITTEN), (0.0, TURNS)])
    found = score(teachers_of(scorer := Scorer()), batch, prompts=[[[7, 7, 7], [8], None]])
    assert sorted(scorer.asked) == [[7, 7, 7, 3, 4, 5, 6], [8, 3, 4]]
    first, second, third = found.logprobs[0]
    assert first.tolist() == [-21.0, -24.0, -33.0]
    assert second[:2].tolist() == [-8.0, -11.0]
    assert np.isnan(second[2]), "its history was rewritten"
    assert np.isnan(third).all()
    assert (found.failed, found.unhinted) == (0, 1)


def test_an_episode_that_fails_is_left_out_and_counted():
    batch = batch_of([(0.0, [([1, 2], [3])]), (1.0, [([1, 2], [4])])])
    found = score(teachers_of(Scorer(refuses=(4,))), batch, top_k=2)
    assert found.logprobs[0][0].tolist() == [-3.0]
    assert np.isnan(found.logprobs[0][1]).all()
    assert np.isnan(found.top_logprobs[0][1]).all()
    assert found.failed == 1
    assert "it died" in found.problem
    with pytest.raises(ServiceError, match="it died"):
        score(teachers_of(Scorer(refuses=(1,))), batch)


def test_a_bug_is_raised():
    scorer = Scorer()
    scorer.score = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        score(teachers_of(scorer), batch_of([(0.0, TURNS)]))


def test_tokens_in_whose_place_the_teacher_has_padding_are_left_out():
    found = score(teachers_of(Scorer(beyond=4)), batch_of([(0.0, TURNS)]), top_k=2)
    assert np.isnan(found.top_logprobs[0][0]).all(axis=1).tolist() == [False, True, False]
    assert found.top_ids[0][0].max() < VOCAB
    assert np.isfinite(found.logprobs[0][0]).all()


def test_each_source_has_its_teacher():
    def group(source: str) -> Group:
        task = Task(id=source, source=source, messages=({"role": "user", "content": "?"},))
        turn = Turn(prompt_ids=(1,), token_ids=(len(source),), logprobs=(-1,), versions=(0,), text="")
        return Group(task=task, episodes=(Episode(task=task, turns=(turn,)),))

    policy, math = Scorer(), Scorer()
    batch = Batch(groups=(group("math"), group("other")), version=0)
    score(teachers_of(policy, math=math), batch)
    assert (policy.asked, math.asked) == ([[1, 5]], [[1, 4]])


def test_flags_name_teachers_and_the_mixture_needs_one_for_each_source():
    found = build_teachers(["math=org/big", "policy"], TeachersConfig(replicas=2))
    assert found.models == {"math": "org/big", "": "policy"}
    found.check_sources(["math", "code"])
    with pytest.raises(ConfigError, match="no source is called math"):
        found.check_sources(["maths"])
    with pytest.raises(ConfigError, match="the source code has no teacher"):
        build_teachers(["math=org/big"]).check_sources(["math", "code"])


@pytest.mark.parametrize(
    ("texts", "said"),
    [([], "no teacher is given"), (["a", "b"], "already has a teacher"), (["a:k=3"], "takes no options")],
)
def test_a_wrong_flag_is_refused(texts: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        build_teachers(texts)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path):
    model = bundled_model(default_cache())
    check_same_tokens("itself", model, model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(model / name, tmp_path / name)
    given = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = given["model"]["vocab"]
    a, b = list(vocab)[1000:1002]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path / "tokenizer.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match="the teacher other has another tokenizer than the policy: 2 tokens differ"):
        check_same_tokens("other", tmp_path, model)


def test_scores_of_an_engine_are_validated():
    good = {"logprobs": [-1.0, -2.0], "top_ids": [[1], [2]], "top_logprobs": [[-1.0], [-0.5]]}
    assert validate_scores(ScoredTokens(**good), 2, 1, 3) == ""
    excluded: Any = good | {"logprobs": [-np.inf, np.nan]}
    assert validate_scores(ScoredTokens(**excluded), 2, 1, 3) == ""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"logprobs": [-1.0]}, "have logprobs of shape"),
        ({"top_ids": [[1, 2], [2, 1]]}, "have shape"),
        ({"top_ids": [[1], [3]]}, "not one of 3"),
        ({"top_ids": [[1], [-1]]}, "not one of 3"),
        ({"logprobs": [0.5, -1.0]}, "a logprob is 0.5"),
    ]
    for change, said in wrong:
        assert said in validate_scores(ScoredTokens(**good | change), 2, 1, 3)
    assert validate_scores({}, 2, 1, 3) == "scores are of type dict"
