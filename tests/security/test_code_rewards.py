"""Rewards that run code: answers that try to cheat score 0, honest ones 1, and failures of the sandbox nothing."""

import asyncio
from collections.abc import Iterator

import pytest

from forge_rl.errors import TaskError
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.sandbox import SandboxError
from forge_rl.sandbox.fences import fenced_code, last_code
from forge_rl.types import Score, Task
from forge_rl.worlds.inside import plain
from forge_rl.worlds.programs import Programs, equal
from forge_rl.worlds.unit_tests import UnitTests
from tests.code_tricks import CALLED, CASES, HONEST, HONEST_PROGRAM, PRINTED, TESTS
from tests.sandbox_pool import kill_servers, loop_with_pool

UNIT, PROGRAM = UnitTests(timeout_s=1), Programs(timeout_s=1)
HASTY_UNIT, HASTY_PROGRAM = UnitTests(timeout_s=0.5), Programs(timeout_s=0.5)
PATIENT_UNIT, PATIENT_PROGRAM = UnitTests(timeout_s=30), Programs(timeout_s=30)
"""For what must come to its end, on a busy machine too."""
ENDLESS = ("a time bomb", "a handler of signals", "the output, then sleep")
"""Tricks whose end is that of their time."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    yield from loop_with_pool()


def task(**truth: object) -> Task:
    return Task(id="1", source="s", messages=({"role": "user", "content": "?"},), truth=truth)


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def score(loop: asyncio.Runner, code: str, tests: object = TESTS, **truth: object) -> Score:
    return loop.run(PATIENT_UNIT(task(tests=tests, **truth), fenced(code)))


@pytest.mark.parametrize("name", CALLED)
def test_a_trick_passes_no_tests(loop: asyncio.Runner, name: str):
    reward = HASTY_UNIT if name in ENDLESS else UNIT
    assert loop.run(reward(task(tests=TESTS), fenced(CALLED[name]))).total == 0


@pytest.mark.parametrize("name", PRINTED)
def test_a_trick_prints_no_right_output(loop: asyncio.Runner, name: str):
    reward = HASTY_PROGRAM if name in ENDLESS else PROGRAM
    assert loop.run(reward(task(cases=CASES), fenced(PRINTED[name]))).total == 0


CHECK = "def check(candidate):\n    for n, prime in [(1, 2), (8, 19)]:\n        assert candidate(n) == prime"
UNITTEST = """import unittest
class TestAnswer(unittest.TestCase):
    def test_primes(self):
        self.assertEqual(answer(8), 19)
    def test_refusal(self):
        with self.assertRaises(IndexError):
            answer(0)
"""
COUNTS = "import collections\ndef count(a): return collections.Counter(a)"
METHOD = "class Solution:\n    def up(self, n): return n + 1\n    def two(self, a): return a, (a,)"
NEVER_UNEQUAL = "class A(int):\n    __ne__ = lambda *a: False\nanswer = A"
SHAPES = "assert shapes() == ((1, 2.5), {'a': [None, True]}, {3}, b'x', 1 << 70, 'é')\nassert list(shapes()) != []"


@pytest.mark.parametrize(
    ("code", "truth"),
    [
        (HONEST, {}),
        (HONEST + "\nif __name__ == '__main__':\n    print(answer(int(input())))", {}),
        (HONEST, {"tests": TESTS.splitlines()}),
        (HONEST, {"tests": CHECK, "entry_point": "answer"}),
        (HONEST, {"tests": f"def test_one():\n    {TESTS.splitlines()[0]}"}),
        (HONEST, {"tests": UNITTEST}),
        ("def shapes(): return (1, 2.5), dict(a=[None, True]), {3}, b'x', 1 << 70, 'é'", {"tests": SHAPES}),
        (COUNTS, {"tests": "assert count('aab') == dict(a=2, b=1)"}),
        ("def up(n):\n    for each in range(n): yield each", {"tests": "assert list(up(3)) == [0, 1, 2]"}),
        (METHOD, {"tests": "assert up(1) == 2", "entry_point": "Solution().up"}),
        ("def f(x): return g(x)\ndef g(x): return x", {"tests": "assert f(1) == h(1)", "setup": "def h(x): return x"}),
    ],
)  # fmt: skip
def test_an_honest_solution_passes(loop: asyncio.Runner, code: str, truth: dict):
    result = score(loop, code, **truth)
    assert (result.total, result.feedback) == (1, "")


@pytest.mark.parametrize(
    ("code", "cases"),
    [
        (HONEST_PROGRAM, CASES),
        (HONEST_PROGRAM + "\nexit()", CASES),
        ("import sys\nsys.stdout.write('%d ' % len(sys.stdin.buffer.read()))", [{"input": "12", "output": "2\n"}]),
        ("print(*map(len, open(0).read().split()))", {"inputs": ["a bb", ["c", "dd"]], "outputs": ["1 2", ["1 2"]]}),
        (HONEST, {"fn_name": "answer", "inputs": [[1], [8]], "outputs": [2, 19]}),
        (HONEST, '{"fn_name": "answer", "inputs": [[1], [8]], "outputs": [2, 19]}'),
        (METHOD, {"fn_name": "two", "inputs": [[1]], "outputs": [[1, [1]]]}),
    ],
)  # fmt: skip
def test_an_honest_program_prints_the_right_output(loop: asyncio.Runner, code: str, cases: object):
    result = loop.run(PATIENT_PROGRAM(task(cases=cases), fenced(code)))
    assert (result.total, result.feedback) == (1, "")


def test_a_share_of_the_tests_counts_if_asked_for(loop: asyncio.Runner):
    half = "def answer(n): return {1: 2}.get(n, 11)"
    tested_task = task(tests=TESTS.splitlines(), cases=CASES)
    assert loop.run(UnitTests(partial=True)(tested_task, fenced(half))).total == pytest.approx(2 / 3)
    program = fenced(f"{half}\nprint(answer(int(input())))")
    assert loop.run(Programs(partial=True)(tested_task, program)).total == pytest.approx(2 / 3)
    assert loop.run(PROGRAM(tested_task, program)).total == 0


@pytest.mark.parametrize(
    ("tests", "code"),
    [
        ("assert all(map(answer, [1, 5]))", "def answer(n): raise StopIteration"),
        ("assert not abs(answer(1) - 2) > 1e-6", "def answer(n): return float('nan')"),
        (
            "assert not abs(answer(1) - 2) > 1e-6",
            "forge_solution.encode = lambda value: 'NaN'\ndef answer(n): return 0",
        ),
        ("assert eval(answer(1)) == 2", "def answer(n): return 'undefined'"),
        ("assert eval(answer(1)) == 2", "def answer(n): return '('"),
        ("assert __import__(answer(1)).sep == '/'", "def answer(n): return 'no_such_module'"),
        (
            "assert not any(each != 2 for each in [answer(1)])",
            "class A(int):\n    __ne__ = lambda *a: False\nanswer = A",
        ),
        ("found = answer(1)\nassert found in (2, [found])", "answer = lambda n: type('A', (), {})()"),
    ],
)
def test_a_trick_passes_no_loose_tests_either(loop: asyncio.Runner, tests: str, code: str):
    assert score(loop, code, tests).total == 0


def test_a_solution_cannot_replace_a_helper_of_the_tests(loop: asyncio.Runner):
    cheat = "def near(a, b): return True\ndef answer(n): return 4"
    tests, setup = "assert near(answer(1), 2)", "def near(a, b): return abs(a - b) < 1"
    assert score(loop, cheat, tests, setup=setup).total == 0
    assert score(loop, HONEST, tests, setup=setup).total == 1


@pytest.mark.parametrize(
    ("truth", "cause"),
    [
        ({}, "has no tests: 'tests' is None"),
        ({"tests": "assert 1 == 1"}, "never call a function"),
        ({"tests": "assert 1 == 1", "entry_point": "answer"}, "never call answer"),
        ({"tests": "import numpy\nassert answer(1) == 2"}, "No module named 'numpy'"),
        ({"tests": "assert answer(1 == 2"}, "SyntaxError"),
        ({"tests": TESTS, "setup": "1 / 0"}, "ZeroDivisionError"),
        ({"tests": "assert answer(missing) == 2", "entry_point": "answer"}, "'missing' is not defined"),
        ({"tests": "assert missing(answer(1)) == 2", "entry_point": "answer"}, "'missing' is not defined"),
        ({"tests": "found = answer(1)\nassert missing == found", "entry_point": "answer"}, "'missing' is not defined"),
        ({"tests": "assert answer(print) == 2"}, "an argument that cannot cross"),
        ({"tests": "while True: answer"}, "CellOverrun"),
    ],
)
def test_tests_that_cannot_be_run_are_the_tasks_fault_not_the_answers(loop: asyncio.Runner, truth: dict, cause: str):
    reward = HASTY_UNIT if cause == "CellOverrun" else PATIENT_UNIT
    with pytest.raises(TaskError, match=cause):
        loop.run(reward(task(**truth), fenced(HONEST)))


def test_a_sandbox_that_dies_while_it_scores_gives_no_score(loop: asyncio.Runner):
    async def work() -> None:
        slow = UnitTests(timeout_s=60)(task(tests=TESTS), fenced("import time\ntime.sleep(60)"))
        scoring = asyncio.create_task(slow)
        await asyncio.sleep(1)
        await kill_servers()
        await scoring

    with pytest.raises(SandboxError, match="gone"):
        loop.run(work())
    assert score(loop, HONEST).total == 1  # a new server was started


def test_plain_data_comes_back_equal_and_of_its_own_class():
    shapes = [None, True, -1, 1 << 80, 1.5, float("inf"), 2j, "a\ud800", b"\xff", [1, (2,), {3}, frozenset({4})]]
    shapes += [{(1, 2): {"a": []}}, range(1, 9, 2)]
    for shape in shapes:
        decoded_value = plain.decode(plain.encode(shape))
        assert (decoded_value, type(decoded_value)) == (shape, type(shape))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "NaN",
        '["list", Infinity]',
        '["eval", "1"]',
        '["int"]',
        '["dict", 1]',
        '["set", ["list"]]',
        "[" * 9999,
    ],
)
def test_a_text_that_is_no_plain_data_is_refused(text: str):
    with pytest.raises((ValueError, TypeError, LookupError, RecursionError)):
        plain.decode(text)


@pytest.mark.parametrize(
    ("output", "expected", "tolerance", "right"),
    [
        ("1 2 \n\n", "1 2\n", 0.0, True),
        ("1  2", "1 2", 0.0, False),
        ("1.0001", "1", 0.0, False),
        ("1.0001", "1", 1e-3, True),
        ("nan", "1", 1e9, False),
        ("1 2", "1", 1e-3, False),
        ("", "1", 0.0, False),
        ("1\r\n2\r\n", "1\n2\n", 0.0, True),
        ("1\x0c2", "1\n2", 0.0, False),
    ],
)
def test_outputs_are_compared_by_line(output: str, expected: str, tolerance: float, right: bool):
    assert equal(output, expected, tolerance) == right


@pytest.mark.parametrize(
    ("text", "blocks", "last"),
    [
        ("a\n```python\nx = 1\n```\nb\n~~~py\ny\n~~~", ["x = 1", "y"], "y"),
        ("```\nx\n```\n```sh\nls\n```", ["x"], "x"),
        ("```sh\nls\n```", [], None),
        ("print(1)", [], "print(1)"),
        ("```python\nx = '''\n``` no end\n'''", ["x = '''\n``` no end\n'''"], "x = '''\n``` no end\n'''"),
        ("````\n```\nx\n```\n````", ["```\nx\n```"], "```\nx\n```"),
        ("  ```python\n  x\n  ```", ["  x"], "  x"),
        ("```python\r\nx = 'a\u2028b\x0c'\r\n```", ["x = 'a\u2028b\x0c'"], "x = 'a\u2028b\x0c'"),
    ],
)
def test_the_last_block_of_python_is_the_answer(text: str, blocks: list[str], last: str | None):
    assert fenced_code(text) == blocks
    assert last_code(text) == last


def test_the_rewards_have_names():
    assert build_reward(["unit_tests:tests=test,partial=true"]) == UnitTests(tests="test", partial=True)
    assert build_reward(["programs:cases=io,timeout_s=2"]) == Programs(cases="io", timeout_s=2.0)
