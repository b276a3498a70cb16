"""Mixtures of files, named tasks, folders, hub data sets and iterables."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError

from forge_rl.data.data_config import DataConfig
from forge_rl.data.mixture import Mixture, as_mixture
from forge_rl.data.sources import Columns, IterableSource, TableSource, hub
from forge_rl.data.sources.files import find_files
from forge_rl.errors import TaskError
from forge_rl.types import Task
from recipes import grpo
from tests.test_files import build, draw, questions, rows, source, write_gz, write_jsonl


def test_files_and_generated_tasks_mix_with_their_own_instructions(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{"problem": f"{n}?", "solution": n} for n in range(50)])
    mixture = build(f"{path}:question=problem,answer=solution*0.7", "chain_sum*0.3")
    assert mixture.shares == {"train": 0.7, "chain_sum": 0.3}
    task = mixture.draw_from("train")
    assert task.source == "train"
    assert str(task.messages[0]["content"]) == f"{task.truth['answer']}?"
    assert str(mixture.draw_from("chain_sum").messages[-1]["content"]).endswith(" Answer with a number.")
    assert {task.source for task in mixture.held_out(10)} == {"train", "chain_sum"}


def test_patterns_folders_and_named_tasks_are_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    for n in range(2):
        write_jsonl(tmp_path / "data" / f"part-{n}.jsonl", rows(6)[n * 3 : n * 3 + 3])
    monkeypatch.chdir(tmp_path)
    for named, name in (
        ("data/*.jsonl*0.5", "data"),
        ("data/**/*.jsonl", "data"),
        ("data*2", "data"),
        ("sums=data/*.jsonl", "sums"),
        ("./data", "data"),
    ):
        mixture = build(named, held_out_share=0.01) if "/" in named else build("./" + named, held_out_share=0.01)
        assert list(mixture) == [name]
        assert len({mixture.draw_from(name).id for _ in range(6)}) == 6


def test_configurations_of_a_data_set_are_not_read_as_one(tmp_path: Path) -> None:
    for name in ("main", "socratic"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "train-00000-of-00001.jsonl", rows(6))
    with pytest.raises(TaskError, match=r"several configurations of a data set, .*: main, socratic\n.*/\*\*/\*\.jsonl"):
        build(str(tmp_path))
    for named, count in ((f"{tmp_path}/main", 6), (f"{tmp_path}/**/*.jsonl", 12)):
        assert len(find_files(named)) == count // 6


def test_copies_of_files_are_in_the_cache_of_the_run(tmp_path: Path) -> None:
    path = write_gz(tmp_path / "a.jsonl.gz", rows(6))
    cache = tmp_path / "cache"
    mixture = DataConfig().build([str(path)], seed=0, eval_tasks=[f"b={path}"], cache=cache)
    assert mixture.draw_from("a").source == "a"
    assert [file.suffix for file in (cache / "tables").iterdir() if not file.name.startswith(".")] == [".jsonl"]
    config = grpo.Config(tasks=(str(path),), cache=tmp_path / "of the run")
    assert config.sources(lambda task: None).draw_from("a").source == "a"  # type: ignore[arg-type,return-value]
    assert [*(tmp_path / "of the run" / "tables").glob("*.jsonl")]


def test_a_plain_name_is_a_data_set_before_it_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("chain_sum", "mine"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "a.jsonl", rows(20))
    monkeypatch.chdir(tmp_path)
    mixture = build("chain_sum", "mine")
    assert "entry" in mixture.draw_from("chain_sum").truth
    assert "entry" not in mixture.draw_from("mine").truth


def test_a_folder_that_datasets_wrote_is_read_split_by_split(tmp_path: Path) -> None:
    import datasets

    half = datasets.Dataset.from_list(rows(20))
    datasets.DatasetDict({"train": half, "test": half.select(range(5))}).save_to_disk(str(tmp_path / "saved"))
    paths = find_files(str(tmp_path / "saved"), split="test")
    assert len(set(questions(draw(source(*paths), 5)))) == 5
    assert len(list(source(*find_files(str(tmp_path / "saved" / "train"))).held_out(0))) == 0


def test_a_named_evaluation_set_replaces_the_held_out_share(tmp_path: Path) -> None:
    train, test = (
        write_jsonl(tmp_path / f"{name}.jsonl", part) for name, part in (("train", rows(40)), ("test", rows(50)[40:]))
    )
    assert list(build(str(train)).eval_sets(5)) == ["held_out"]
    sets = build(str(train), eval_tasks=(f"maths={test}:answer=answer", "chain=chain_sum:max_terms=3")).eval_sets(20)
    assert {name: len(tasks) for name, tasks in sets.items()} == {"maths": 10, "chain": 20}
    mixture = build(str(train), eval_tasks=(str(test),))
    assert len({mixture.draw_from("train").id for _ in range(40)}) == 40
    assert list(mixture.eval_sets(5)) == ["test"]
    assert mixture.eval_sets(0) == {}
    assert list(build(str(train), eval_tasks=(str(test),), held_out_share=0.3).eval_sets(5)) == ["held_out", "test"]


def test_a_hub_id_is_read_from_the_files_that_datasets_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` takes a folder of that name for the data set: no network is needed."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    write_jsonl(tmp_path / "org" / "name" / "train.jsonl", rows(30))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for split, count in (("train", 30), ("train[:7]", 7)):
        found = TableSource("t", [hub.fetch("org/name", split=split)], Columns(), seed=0, held_out_share=0.0)
        expected = questions([Columns().read(row, "t")[0] for row in rows(count)])
        assert sorted(questions(draw(found, count))) == sorted(expected)


def refused_by_hub(status: int, message: str) -> Exception:
    """The error that `datasets` raises for an answer of the hub."""
    response = httpx.Response(status, headers={"x-error-message": message}, request=httpx.Request("GET", "http://hub"))
    error = ConnectionError("Couldn't reach 'org/nothing' on the Hub (HfHubHTTPError)")
    error.__cause__ = HfHubHTTPError(f"status {status}", response=response, server_message=message or None)
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("no route"), "cannot get the data set 'org/nothing' from the hub: the hub cannot be reached"),
        (
            refused_by_hub(403, "not with this token"),
            r"the hub answers with status 403: not with this token\n.*hf auth login",
        ),
        (refused_by_hub(503, ""), "the hub answers with status 503"),
        (ValueError("Unknown split 'dev'"), r"from the hub: Unknown split 'dev'\n.*:config=NAME,split=NAME"),
    ],
)
def test_a_hub_id_that_cannot_be_had_is_an_error(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(TaskError, match=said):
        build("org/nothing:config=main,split=dev")


# Iterables.


def generated() -> list[dict[str, object]]:
    return rows(30)


ITERABLES: dict[str, Callable[[], object]] = {
    "list": lambda: rows(30),
    "function of a list": lambda: generated,
    "generator function": lambda: lambda: (row for row in rows(30)),
    "tasks": lambda: [Task(id=str(n), source="x", messages=({"role": "user", "content": f"{n}?"},)) for n in range(30)],
}


@pytest.mark.parametrize("kind", ITERABLES)
def test_an_iterable_is_a_source_that_repeats_and_resumes(kind: str) -> None:
    def made() -> IterableSource:
        return IterableSource("mine", ITERABLES[kind](), seed=1)  # type: ignore[arg-type]

    whole = made()
    held_out = whole.held_out(30)
    drawn, states = [], []
    for _ in range(80):
        states.append(json.loads(json.dumps(whole.state())))
        drawn.append(whole.draw())
    counts = Counter(task.id for task in drawn)
    assert len(counts) + len(held_out) == 30
    assert not counts.keys() & {task.id for task in held_out}
    assert {task.source for task in (*drawn, *held_out)} == {"mine"}
    assert whole.epoch >= 2
    for stopped in (0, 5, 40, 79):
        resumed = made()
        resumed.restore(states[stopped])
        assert [resumed.draw() for _ in range(80 - stopped)] == drawn[stopped:]


def test_a_bare_iterator_goes_on_until_it_ends() -> None:
    first = IterableSource("mine", iter(rows(10)))
    drawn = draw(first, 4)
    state = first.state()
    assert first.held_out(5) == ()
    resumed = IterableSource("mine", iter(rows(10)))
    resumed.restore(state)
    assert resumed.draw() == first.draw()
    assert len(drawn) == 4
    with pytest.raises(TaskError, match=r"is at item .* and cannot go back"):
        first.restore(IterableSource("mine", iter(rows(10))).state())
    with pytest.raises(TaskError, match="ended after 10 items"):
        draw(first, 10)


def test_a_python_file_gives_tasks_by_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def sums():\n    for n in range(50):\n        yield {'asked': f'{n} + 1?', 'answer': n + 1}\n")
    mixture = build(f"{path}:sums:question=asked*0.5", "chain_sum")
    assert mixture.shares["sums"] == pytest.approx(1 / 3)
    assert mixture.draw_from("sums").messages[0]["content"] == "0 + 1?"
    assert (
        len(
            build(
                str(tmp_path / "mine.py") + ":sums:question=asked", eval_tasks=(f"own={path}:sums:question=asked",)
            ).eval_sets(100)["own"]
        )
        == 50
    )


def test_a_mixture_is_made_of_whatever_gives_tasks() -> None:
    own = IterableSource("own", rows(5))
    assert as_mixture(Mixture({"a": own}), seed=0).shares == {"a": 1.0}
    assert list(as_mixture(own, seed=0)) == ["own"]
    assert list(as_mixture(rows(5), seed=0)) == ["tasks"]
    assert list(as_mixture({"a": rows(5), "b": own, "c": generated}, seed=0)) == ["a", "b", "c"]
    assert as_mixture(generated, seed=0).draw_from("tasks").source == "tasks"
