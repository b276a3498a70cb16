"""Sources of tasks: what they draw, what they hold out, how they resume, and how they are written."""

import itertools
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from forge_rl.data.data_config import ONE_DIGIT_ADDITION, DataConfig
from forge_rl.data.mixture import Mixture
from forge_rl.data.sources import IterableSource, ReasoningGymSource, Reseedable, Source
from forge_rl.data.sources.reasoning_gym import problem_of
from forge_rl.envs.task_list import seeded
from forge_rl.errors import TaskError
from forge_rl.flags.texts import parse
from forge_rl.types import Task

EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 distinct questions


def _source(seed: int = 0, share: float = 0.2, **options: str) -> ReasoningGymSource:
    return ReasoningGymSource("chain_sum", EASY, seed, share, **options)


def _questions(tasks: list[Task] | tuple[Task, ...]) -> list[str]:
    return [task.messages[-1]["content"] for task in tasks]


def test_a_source_fulfils_the_protocol() -> None:
    source: Source = _source()
    assert source.name == "chain_sum"


def test_a_task_shows_the_question_and_holds_the_truth() -> None:
    task = _source(instruction=" Answer with a number.", system="Be brief.").draw()
    entry = task.truth["entry"]
    assert isinstance(entry, dict)
    assert task.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": entry["question"] + " Answer with a number."},
    )
    assert task.source == "chain_sum"
    assert pickle.loads(pickle.dumps(task)) == task
    assert task.truth["answer"] == entry["answer"]
    json.dumps(dict(task.truth))


def test_no_held_out_question_is_ever_drawn() -> None:
    source = _source()
    held_out = set(_questions(source.held_out(1000)))
    drawn = {_questions([source.draw()])[0] for _ in range(2000)}
    assert 20 <= len(held_out) <= 60  # about a fifth of 200
    assert len(drawn) > 100
    assert not drawn & held_out


def test_no_held_out_problem_of_the_demo_is_drawn_in_any_wording() -> None:
    def problems(tasks: Iterable[Task]) -> set[tuple[int, ...]]:
        return {tuple(sorted(map(int, re.findall(r"\d+", text)))) for text in _questions(tuple(tasks))}

    demo = parse(ONE_DIGIT_ADDITION, "--tasks")
    source = ReasoningGymSource(demo.name, demo.params, 0, 0.25)
    held_out = source.held_out(100)
    assert len(set(_questions(held_out))) == 100
    drawn = problems(source.draw() for _ in range(2000))
    assert len(drawn) > 40
    assert not drawn & problems(held_out)


@pytest.mark.parametrize(
    ("question", "metadata", "problem"),
    [
        ("Solve 4 + 3.", {"expression": "4 + 3", "num_terms": 2}, ["+", "3", "4"]),
        ("What is 3 + 4?", {"expression": "3 + 4", "difficulty": {"is": "what"}}, ["+", "3", "4"]),
        ("What is 4 - 3?", {"expression": "4 - 3"}, ["4", "-", "3"]),
        ('How many "e" in "tree"?', {"letter": "e", "word": ["tree", None]}, ["e", "tree"]),
        ("Where are 2 cats?", {"source_dataset": "cats"}, ["where", "are", "2", "cats", "?"]),
    ],
)
def test_a_problem_is_its_content_and_not_its_wording(
    question: str, metadata: dict[str, object], problem: list[str]
) -> None:
    assert problem_of({"question": question, "metadata": metadata}) == problem


def test_held_out_questions_are_distinct_and_the_same_for_every_seed() -> None:
    held_out = _source(seed=1).held_out(15)
    assert len(set(_questions(held_out))) == 15
    assert held_out == _source(seed=2).held_out(15)


def test_a_shorter_held_out_set_is_the_beginning_of_a_longer_one() -> None:
    assert _source().held_out(12)[:5] == _source().held_out(5)


def test_the_held_out_part_does_not_depend_on_the_instruction() -> None:
    plain, instructed_tasks = _source().held_out(5), _source(instruction=" Think.").held_out(5)
    assert [task.id for task in plain] == [task.id for task in instructed_tasks]


def test_seeds_give_streams_that_do_not_overlap_by_a_shift() -> None:
    wide = {"min_terms": 5, "max_terms": 5, "min_digits": 3, "max_digits": 3}
    streams = [ReasoningGymSource("chain_sum", wide, seed, 0.1) for seed in (0, 1)]
    first, second = ({stream.draw().id for _ in range(100)} for stream in streams)
    assert not first & second


def test_the_same_seed_gives_the_same_stream_in_another_process() -> None:
    program = (
        "from forge_rl.data.sources import ReasoningGymSource as S;"
        f"s = S('chain_sum', {EASY}, 3, 0.2); print([s.draw().id for _ in range(5)])"
    )
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    source = _source(seed=3)
    assert process.stdout.strip() == str([source.draw().id for _ in range(5)])


def test_a_restored_source_goes_on_where_it_stood() -> None:
    source = _source()
    for _ in range(7):
        source.draw()
    state = json.loads(json.dumps(source.state()))
    expected = [source.draw() for _ in range(5)]
    resumed = _source()
    resumed.restore(state)
    assert [resumed.draw() for _ in range(5)] == expected


@pytest.mark.parametrize("kind", ["generated", "file", "list", "environment"])
def test_a_source_begins_again_in_the_order_of_another_seed(kind: str, tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(50)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def of(seed: int) -> Source:
        if kind == "environment":
            return seeded("game", tasks=50, held_out=2, prompt="go", seed=seed)
        if kind == "list":
            return IterableSource("rows", rows, seed=seed)
        text = str(tmp_path / "rows.jsonl") if kind == "file" else "chain_sum"
        (source,) = DataConfig().build((text,), seed=seed).sources.values()
        return source

    source = of(1)
    first = [source.draw() for _ in range(8)]
    assert isinstance(source, Reseedable)
    source.reseed(2)
    tasks = [source.draw() for _ in range(8)]
    assert tasks == [other.draw() for other in [of(2)] for _ in range(8)] != first
    source.reseed(1)
    source.restore(of(1).state())
    assert [source.draw() for _ in range(8)] == first


def test_the_state_of_another_stream_is_refused() -> None:
    with pytest.raises(TaskError, match="belongs to another stream"):
        _source(seed=1).restore(_source(seed=2).state())


@pytest.mark.parametrize("dataset", ["gsm_symbolic", "word_ladder", "chain_sum"])
def test_a_stream_does_not_end_with_a_data_set(dataset: str) -> None:
    source = ReasoningGymSource(dataset, {}, 0, 0.1)
    source.restore({**source.state(), "index": 499})
    ids = [source.draw().id for _ in range(3)]
    assert len(set(ids)) == 3


def test_fewer_questions_than_asked_for_give_what_there_is() -> None:
    assert 0 < len(_source().held_out(10_000)) < 200


def test_questions_too_few_to_hold_any_out_are_an_error() -> None:
    ten_questions = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}  # ten questions
    with pytest.raises(TaskError, match="none is held out"):
        ReasoningGymSource("chain_sum", ten_questions, 0, 0.005).held_out(1)
    with pytest.raises(TaskError, match="all are held out"):
        ReasoningGymSource("chain_sum", ten_questions, 0, 0.97).draw()


def test_nothing_held_out_cannot_be_evaluated() -> None:
    with pytest.raises(TaskError, match="nothing of"):
        _source(share=0.0).held_out(1)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_that_cannot_be_is_refused(share: float) -> None:
    with pytest.raises(TaskError, match="held_out_share"):
        _source(share=share)


def _make(*texts: str) -> Mixture:
    return DataConfig(held_out_share=0.1).build(texts, seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chainsum", r"no data set named 'chainsum'.*did you mean chain_sum"),
        ("chain_sum:terms=2", "no parameter 'terms'.*did you mean .*_terms"),
        ("chain_sum:seed=2", "no parameter 'seed'"),
        ("chain_sum:min_terms=3,max_terms=2", "data set 'chain_sum' refuses"),
        ("chain_sum:min_terms=many", "data set 'chain_sum' refuses"),
        ("chain_sum:min_digits=0", "data set 'chain_sum' refuses"),
    ],
)
def test_a_source_that_cannot_be_made_is_refused(text: str, message: str) -> None:
    with pytest.raises(TaskError, match=f"(?s){message}") as caught:
        _make(text)
    assert "seed" not in caught.value.hint


def test_specs_of_one_data_set_get_names_of_their_own() -> None:
    mixture = _make("chain_sum:max_terms=3", "chain_sum:max_terms=4", "leg_counting")
    assert list(mixture) == ["chain_sum:max_terms=3", "chain_sum:max_terms=4", "leg_counting"]
    assert all(name == mixture.draw_from(name).source for name in mixture)


def test_the_same_spec_twice_is_an_error() -> None:
    with pytest.raises(TaskError, match="given twice"):
        _make("chain_sum", "chain_sum")


def test_a_question_is_held_out_under_all_parameters_or_none() -> None:
    more = {**EASY, "max_terms": 3}
    held_out = {task.id for task in ReasoningGymSource("chain_sum", more, 0, 0.2).held_out(50)}
    source = _source()
    drawn = itertools.islice(iter(source.draw, None), 1000)
    assert not {task.id for task in drawn if task is not None} & held_out


def test_importing_the_data_modules_loads_no_heavy_library() -> None:
    program = (
        "import sys, forge_rl.data.sources, forge_rl.models.resolve, forge_rl.data.mixture, forge_rl.tokens.tokenizer,"
        "forge_rl.rewards.verifiers, forge_rl.envs.single_turn;"
        "print(sorted({'torch', 'transformers', 'reasoning_gym', 'gguf'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"
