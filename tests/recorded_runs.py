"""Run folders as runs of each kind leave them, written by the recorder itself; no service is started."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from forge_rl.metrics import RunInfo
from forge_rl.metrics.episode_files import Kind, RecordedEpisode
from forge_rl.metrics.recorder import FOLDER, EpisodeRecorder, Recording
from forge_rl.metrics.trace import Trace
from forge_rl.metrics.vocabulary import write_vocabulary
from forge_rl.types import Episode, Outcome, Score, Task, ToolCall, Turn


class Words:
    """A vocabulary that grows with the texts that it encodes; words keep the space before them."""

    def __init__(self) -> None:
        self.pieces: dict[str, int] = {"<|im_end|>": 0}

    def ids(self, text: str) -> list[int]:
        piece_ids, word = list[int](), ""
        for letter in text:
            if letter in " \n" and word:
                piece_ids.append(self.pieces.setdefault(word, len(self.pieces)))
                word = ""
            word += letter
        return [*piece_ids, self.pieces.setdefault(word, len(self.pieces))] if word else piece_ids

    @property
    def bytes(self) -> list[bytes]:
        return [piece.encode("utf-8", "backslashreplace") for piece in self.pieces]


class Talk:
    """Makes the turns of an episode from messages and answers, with drawn logprobs."""

    def __init__(self, words: Words, seed: int, version: int) -> None:
        self._words, self._drawn, self._version = words, np.random.default_rng(seed), version
        self._contexts: dict[str, list[int]] = {}
        self.turns: list[Turn] = []

    def turn(
        self,
        messages: Sequence[dict[str, object]],
        answer: str,
        *,
        calls: tuple[ToolCall, ...] = (),
        of: str = "agent",
        response_s: float = 0.0,
        truncated: bool = False,
    ) -> None:
        prompt_text = "".join(f"\n<|im_start|>{message['role']}\n{message['content']}" for message in messages)
        prompt = [*self._contexts.get(of, []), *self._words.ids(f"{prompt_text}\n<|im_start|>assistant\n")]
        tokens = [*self._words.ids(answer), 0]
        self._contexts[of] = [*prompt, *tokens]
        cut = self._drawn.integers(0, len(tokens) + 1)
        self.turns.append(
            Turn(
                prompt_ids=prompt,
                token_ids=tokens,
                logprobs=-self._drawn.exponential(0.5, len(tokens)).astype(np.float32),
                versions=[self._version] * cut + [self._version + 1] * (len(tokens) - cut),
                text=answer,
                messages=tuple(messages),
                calls=calls,
                truncated=truncated,
                agent=of if of != "agent" else "",
                seconds=float(self._drawn.exponential(1.0)) + 0.2,
                response_s=response_s,
            )
        )

    def episode(self, task: Task, reward: float, *, parts: dict[str, float] | None = None, **fields: object) -> Episode:
        score = Score(total=reward, parts=parts or {"correct": reward}, answer=self.turns[-1].text.split()[-1])
        seconds = sum(turn.seconds + turn.response_s for turn in self.turns)
        began = 1764115200.0 + self._version * 30 + seconds % 3
        fields |= {"turns": tuple(self.turns), "score": score, "seconds": seconds, "began": began}
        return Episode(task=task, **fields)  # type: ignore[arg-type]


def task_of(source: str, number: int, question: str, answer: str, system: str = "") -> Task:
    messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    return Task(
        id=f"{source}/{number}",
        source=source,
        messages=(*messages, {"role": "user", "content": question}),
        truth={"answer": answer},
    )


def one_turn(words: Words, drawn: random.Random, version: int, number: int, right: bool, text: str = "") -> Episode:
    a, b = 3 + number * 7 % 50, 2 + number * 13 % 40
    task = task_of("sums", number, f"What is {a} + {b}?", str(a + b), system="You are a careful assistant.")
    talk = Talk(words, drawn.randrange(1 << 30), version)
    answer = f"First {a} and then {b} more, which makes {a + b if right else a + b + drawn.randint(1, 9)}"
    talk.turn([dict(message) for message in task.messages], text or answer)
    return talk.episode(task, float(right), parts={"correct": float(right), "brief": 0.1})


def tools(words: Words, drawn: random.Random, version: int, number: int, right: bool, text: str = "") -> Episode:
    a, b = 12 + number % 90, 11 + number % 80
    task = task_of("products", number, f"Calculate {a} * {b} with the calculator.", str(a * b))
    talk = Talk(words, drawn.randrange(1 << 30), version)
    wrong = ToolCall(id="1", name="calculator", arguments=json.dumps({"expression": f"{a} x {b}"}), seconds=0.004)
    error = f"error: ValueError: '{a} x {b}' is not an arithmetic expression"
    wrong = ToolCall(**{**vars(wrong), "error": error})
    call = ToolCall(id="2", name="calculator", arguments=json.dumps({"expression": f"{a} * {b}"}), seconds=0.003)
    talk.turn([dict(message) for message in task.messages], f"calculator( {a} x {b} )", calls=(wrong,), response_s=0.01)
    talk.turn([{"role": "tool", "content": error}], f"calculator( {a} * {b} )", calls=(call,), response_s=0.01)
    answer = f"The result is {a * b if right else a * b - 1}"
    talk.turn([{"role": "tool", "content": str(a * b)}], text or answer)
    return talk.episode(task, float(right), parts={"correct": float(right), "called": 1.0})


def world(words: Words, drawn: random.Random, version: int, number: int, right: bool, text: str = "") -> Episode:
    task = task_of("maze", number, "You stand at (0, 0). The exit is at (2, 0). Say east or west.", "2 steps")
    talk = Talk(words, drawn.randrange(1 << 30), version)
    moves = ["east", "east", "east"] if right else ["west", "east", "west"]
    observation = "You stand at (0, 0)."
    for step, move in enumerate(moves):
        messages: list[dict[str, object]]
        messages = (
            [dict(message) for message in task.messages] if step == 0 else [{"role": "user", "content": observation}]
        )
        talk.turn(messages, text if text and step == 2 else f"I go {move}", response_s=0.3)
        observation = f"You went {move}: step {step + 1}."
    return talk.episode(task, float(right), parts={"exit": float(right), "steps": -0.03}, outcome=Outcome.TRUNCATED)


def agent(words: Words, drawn: random.Random, version: int, number: int, right: bool, text: str = "") -> Episode:
    task = task_of("research", number, f"Who wrote report {number}?", "Ada")
    talk = Talk(words, drawn.randrange(1 << 30), version)
    call = ToolCall(id="1", name="ask_helper", arguments='{"question": "Who signed it?"}')
    talk.turn([dict(message) for message in task.messages], "I ask my helper.", calls=(call,), response_s=1.4)
    helper: list[dict[str, object]] = [{"role": "system", "content": "You help."}]
    talk.turn([*helper, {"role": "user", "content": "Who signed it?"}], "The signature reads Ada.", of="helper")
    final = text or f"It was {'Ada' if right else 'Bob'}"
    talk.turn([{"role": "tool", "content": "The signature reads Ada."}], final)
    return talk.episode(task, float(right), output=final)


MAKERS = {"one_turn": one_turn, "tools": tools, "world": world, "agent": agent}


def recorded_run(
    folder: Path,
    kind: str,
    *,
    steps: int = 3,
    groups: int = 4,
    size: int = 4,
    skill: float = 0.5,
    text: str = "",
    settings: dict[str, object] | None = None,
) -> Path:
    """Write the folder of a run.

    Args:
        kind: a key of `MAKERS`; "mixed" for all of them in turn; "failed" for a run that ended by a fault in step 2.
        skill: share of right answers at the last step; half of it at the first.
        text: the last answer of each episode; "" for one that fits.
    """
    drawn, words = random.Random(f"{kind} {skill}"), Words()
    makers = list(MAKERS.values()) if kind in ("mixed", "failed") else [MAKERS[kind]]
    folder.mkdir(parents=True)
    config = {"model": "smollm2-135m", "steps": 2 * steps if kind == "failed" else steps, **(settings or {})}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "versions.json").write_text(json.dumps({"torch": "2.13.0", "code": {}}))
    recorder = EpisodeRecorder(folder, Recording())
    recorder.start(RunInfo(recipe="grpo", model="", folder=folder, steps=steps))
    write_metrics = (folder / "metrics.jsonl").open("w")
    clock = [1000.0]
    trace = Trace(folder / "trace.json", clock=lambda: clock[0])

    def made(step: int, kind_: Kind) -> list[RecordedEpisode]:
        rows = []
        for group in range(groups):
            number = group if kind_ == "evaluated" else step * groups + group
            share = 0.0 if group % 4 == 1 else skill * (0.5 + 0.5 * step / steps)
            rights = [drawn.random() < share for _ in range(size)]
            for index, right in enumerate(rights):
                episode = makers[group % len(makers)](words, drawn, step, number, right, text)
                count = sum(len(turn.token_ids) for turn in episode.turns)
                uniform = len(set(rights)) == 1 or kind_ == "evaluated"
                gaps = np.random.default_rng(drawn.randrange(1 << 30)).normal(0, 0.03, count).astype(np.float32)
                advantages = np.full(count, 0.0 if uniform else right - sum(rights) / size, np.float32)
                rows.append(
                    RecordedEpisode(
                        step=step,
                        kind=kind_,
                        set="held_out" if kind_ == "evaluated" else "",
                        group=group,
                        index=index,
                        version=-1 if kind_ == "evaluated" else step + 1,
                        episode=episode,
                        advantages=None if kind_ == "evaluated" else advantages,
                        trainer_gaps=None if uniform else gaps,
                        entropies=None if uniform else 20 * np.abs(gaps),
                        trained=None if uniform else np.ones(count, np.bool_),
                    )
                )
        return rows

    for step in range(1, steps + 1):
        if kind == "failed" and step == 2:
            task = task_of("maze", 9, "You stand at (0, 0).", "2 steps")
            recorder.episode(Episode(task=task, turns=(), outcome=Outcome.ENVIRONMENT_ERROR, problem="the maze raised"))
        records = made(step, "trained")
        recorder.record(step, "trained", lambda records=records: records)  # type: ignore[misc]
        if step % 2 == 1:
            evaluated = made(step, "evaluated")
            recorder.record(step, "evaluated", lambda evaluated=evaluated: evaluated)  # type: ignore[misc]
        recorder.flush()
        _write_step(write_metrics, trace, clock, step, records, drawn)
    recorder.close()
    write_metrics.close()
    trace.close()
    write_vocabulary(folder / FOLDER, words.bytes)
    _write_end(folder, kind, steps)
    return folder


def _write_step(
    file: IO[str], trace: Trace, clock: list[float], step: int, records: list[RecordedEpisode], drawn: random.Random
) -> None:
    """Write the metrics and phases of a step."""
    rewards = [record.episode.reward for record in records]
    lengths = [record.episode.response_tokens for record in records]
    phases = {"rollout": 6 + 3 * drawn.random(), "train": 4 + drawn.random(), "publish": 0.6, "checkpoint": 0.4}
    sources = {record.episode.task.source for record in records}
    row = {
        "step": step,
        "loss": 0.2 / step + 0.02 * drawn.random(),
        "reward/mean": sum(rewards) / len(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        **{f"mixture/{source}": 1 / len(sources) for source in sources},
        **{f"data/{source}/epoch": round(step / 7, 3) for source in sources},
        "tokens/completion_mean": sum(lengths) / len(lengths),
        "tokens/completion_max": max(lengths),
        "entropy": 1.2 / (1 + 0.05 * step) + 0.05 * drawn.random(),
        "grad_norm": 0.5 + 0.3 * drawn.random(),
        "lr": 1e-5,
        "logprob_gap": 0.02 + 0.01 * drawn.random(),
        "groups/uniform": 0.25,
        "episodes/truncated": 0.6 if 4 < step < 9 else 0.1,
        "loss/clipped": 0.35 if step > 12 else 0.1,
        "lag/mean": 0.6,
        "busy/trainer": 0.4 + 0.1 * drawn.random(),
        "busy/generator/0": 0.5 + 0.2 * drawn.random(),
        **{f"seconds/{name}": seconds for name, seconds in phases.items()},
        "seconds/step": sum(phases.values()) + 0.3,
    }
    file.write(json.dumps(row) + "\n")
    for name, seconds in phases.items():
        trace.span("controller", name, clock[0], clock[0] + seconds)
        clock[0] += seconds
    if step == 2:
        trace.instant("generator/0", "fault", cause="killed by SIGKILL")
        trace.span("generator/0", "recovery", clock[0], clock[0] + 4, overlapping=True)


TRACE = """Traceback (most recent call last):
  File "mine.py", line 7, in step
    answers["answer"]
KeyError: 'answer'
"""


def _write_end(folder: Path, kind: str, steps: int) -> None:
    """Write the events, and the summary of a finished run."""
    events = [
        {"time": 1.7e9, "level": "info", "text": "weights travel by shared memory"},
        {"time": 1.7e9 + 40, "level": "warning", "text": "3 of 16 episodes were truncated: raise max-tokens"},
        {"time": 1.7e9 + 60, "level": "fault", "text": "generator/0 failed in phase rollout: killed by SIGKILL"},
        {"time": 1.7e9 + 64, "level": "info", "text": "generator/0 has recovered after 4.1 s"},
        {"time": 1.7e9 + 99, "level": "fault", "text": f"ended by KeyError: 'answer'\n{TRACE}"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if kind == "failed":
        return
    fault = {"service": "generator", "replica": 0, "cause": "killed by SIGKILL", "phase": "rollout", "at_s": 31.2}
    summary = {
        "score_before": 0.2,
        "score_after": 0.61,
        "best": {"step": steps},
        "steps": steps,
        "seconds": 12.5 * steps,
        "faults": [{**fault, "fatal": False, "recovered_s": 4.1}],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
