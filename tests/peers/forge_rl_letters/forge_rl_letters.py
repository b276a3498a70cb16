"""An environment of the verifiers package for tests: a random model's answers differ in its reward."""

import verifiers.v1 as vf

__all__ = ["LettersTaskset"]


class LettersTask(vf.Task[vf.TaskData]):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=2.0)
    async def vowels(self, trace: vf.Trace) -> float:
        return sum(letter in "aeiou" for letter in trace.last_reply) / max(1, len(trace.last_reply))

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LettersConfig(vf.TasksetConfig):
    words: int = 20


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self) -> list[LettersTask]:
        return [
            LettersTask(vf.TaskData(prompt=f"Write a word like number {number}."), self.config.task)
            for number in range(self.config.words)
        ]
