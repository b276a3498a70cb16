"""Rollouts leave no garbage in circles: tokens are freed as soon as nobody needs them."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

from forge_rl.rollout.state import ScheduleConfig
from tests.staged_rollouts import StagedEnvironment, TwoTurns, rollouts


def test_delivered_batches_leave_nothing_to_the_garbage_collector() -> None:
    async def main() -> Counter[str]:
        executor = rollouts(environment=StagedEnvironment(TwoTurns), schedule=ScheduleConfig(max_lag=1))
        await executor.next_batch()
        gc.collect()
        gc.freeze()  # what earlier tests still hold is not looked at, though it may be dropped in the meantime
        gc.set_debug(gc.DEBUG_SAVEALL)
        for _ in range(3):
            await executor.next_batch()
        gc.collect()
        gc.set_debug(0)
        ours = (type(object_left) for object_left in gc.garbage if type(object_left).__module__.startswith("forge_rl"))
        return Counter(kind.__name__ for kind in ours)

    try:
        assert not asyncio.run(main())
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
