"""One environment per source of a mixture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_rl.envs.protocol import Env, EnvFactory, SharesFiles, leaves_of, prepare_env, sees_thoughts
from forge_rl.errors import TaskError
from forge_rl.types import Task


@dataclass(frozen=True)
class BySource:
    """Makes the environment of each task's source.

        environment = BySource({"math": SingleTurn, "game": Game()})

    Raises:
        TaskError: a task's source has no environment.
    """

    environments: Mapping[str, EnvFactory]
    """Environment factories by source name."""

    @property
    def in_process(self) -> bool:
        """True if all environments run in the controller's process."""
        # One environment that needs a process takes all of them there.
        return all(getattr(factory, "in_process", False) for factory in self.environments.values())

    @property
    def leaves(self) -> int:
        """Maximum episodes of a tree, of any environment."""
        return max(map(leaves_of, self.environments.values()), default=1)

    @property
    def scores_itself(self) -> bool:
        """True if all environments score their episodes."""
        return all(getattr(factory, "scores_itself", False) for factory in self.environments.values())

    @property
    def thoughts(self) -> bool:
        """True if all environments see the model's thoughts."""
        return all(map(sees_thoughts, self.environments.values()))

    def prepare(self, tasks: Sequence[Task]) -> Mapping[str, float]:
        """Let each source's environment prepare for its coming tasks; see `EnvFactory`."""
        counts: Counter[str] = Counter()
        for source, factory in self.environments.items():
            source_tasks = [task for task in tasks if task.source == source]
            # Counter.update adds up counts of the same name.
            counts.update(prepare_env(factory, source_tasks))
        return counts

    def serve_files(self, address: str, key: str) -> Sequence[str]:
        """Let the environments that can do so serve the files of their tasks; see `EnvFactory`."""
        # Environments that share a folder of images serve it at one URL.
        urls = [url for factory in self._sharing() for url in factory.serve_files(address, key)]
        return list(dict.fromkeys(urls))

    def ask_peers(self, urls: Sequence[str], key: str) -> None:
        """Give these environments the URLs at which other hosts serve files."""
        for factory in self._sharing():
            factory.ask_peers(urls, key)

    def _sharing(self) -> list[SharesFiles]:
        return [factory for factory in self.environments.values() if isinstance(factory, SharesFiles)]

    def __call__(self, task: Task) -> Env:
        if task.source not in self.environments:
            raise TaskError(
                f"the source {task.source!r} has no environment",
                hint=f"sources with one: {', '.join(self.environments)}",
            )
        return self.environments[task.source](task)
