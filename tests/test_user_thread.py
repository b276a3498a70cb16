"""The thread of users' synchronous code: order, errors, cancelled calls."""

import asyncio
import threading

import pytest

from forge_rl.services.user_thread import UserThread


async def test_functions_are_called_in_order_and_each_caller_gets_its_own_result():
    thread, release, numbers = UserThread(600.0, exit_status=1), threading.Event(), list[int]()

    def note(number: int) -> int:
        if number == 0:
            assert release.wait(600.0)
        if number % 10 == 3:
            raise ValueError(number)
        numbers.append(number)
        return -number

    calls = [asyncio.create_task(thread.call(lambda number=number: note(number))) for number in range(50)]
    await asyncio.sleep(0)
    calls[25].cancel()
    await asyncio.sleep(0)
    release.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    expected = [number for number in range(50) if number % 10 != 3 and number != 25]
    assert numbers == expected, "one at a time, and not the cancelled one, which had not begun"
    assert [results[number] for number in expected] == [-number for number in expected]
    assert [error.args for error in results if isinstance(error, ValueError)] == [(n,) for n in range(3, 50, 10)]
    assert isinstance(results[25], asyncio.CancelledError)
    assert await thread.call(threading.get_ident) == await thread.call(threading.get_ident) != threading.get_ident()


async def test_a_result_does_not_wait_for_the_next_function():
    thread, release = UserThread(600.0, exit_status=1), threading.Event()
    first = asyncio.create_task(thread.call(lambda: 1))
    second = asyncio.create_task(thread.call(lambda: release.wait(600.0)))
    assert await first == 1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(second), 0)
    release.set()
    assert await second


async def test_stop_iteration_costs_no_other_caller_its_result():
    thread, release = UserThread(600.0, exit_status=1), threading.Event()
    calls = [thread.call(lambda: release.wait(600.0)), thread.call(lambda: next(iter(()))), thread.call(lambda: 3)]
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)
    release.set()
    first, error, last = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first, last) == (True, 3)
    assert isinstance(error, RuntimeError)
    assert str(error) == "StopIteration"
