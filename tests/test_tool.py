"""Tools: schemas of Python functions, and calls whose failures the model reads."""

import asyncio
import enum
import json
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from typing_extensions import TypedDict

from forge_rl.envs.calculator import calculator
from forge_rl.envs.tool import Tool
from forge_rl.errors import ConfigError, ForgeError
from tests.overcome import overcome_an_error


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Point:
    x: float
    y: float = 0.0


class Options(TypedDict, total=False):
    deep: bool


def google(city: str, days: int = 3, unit: Literal["c", "f"] = "c") -> str:
    """Forecast the weather.

    It may be wrong.

    Args:
        city: where, such as
            Oslo.
        days: how many.
    """
    return f"{city} {days} {unit}"


def numpy(city: str) -> str:
    """Forecast the weather.

    Parameters
    ----------
    city : str
        where
    """
    return city


def plain(city: str, copy: bool = False) -> None:
    """Forecast the weather."""


def silent(a: int | None = None) -> int | None:
    return a


def rich(unit: Unit, at: Point, numbers: list[int], table: dict[str, float], options: Options) -> dict[str, object]:
    return {"unit": unit.name, "x": at.x + 1, "sum": sum(numbers), "table": table, "options": options}


def annotated(n: Annotated[int, Field(ge=1, description="how many")]) -> list[int]:
    return list(range(n))


def schema_of(function: Callable[..., object]) -> Any:
    return Tool(function).schema["function"]


def call(function: Callable[..., object], arguments: object, timeout_s: float = 30.0) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return asyncio.run(Tool(function).call(text, timeout_s=timeout_s))


def test_a_schema_has_the_docstring_the_hints_and_the_defaults():
    assert Tool(google).schema == {
        "type": "function",
        "function": {
            "name": "google",
            "description": "Forecast the weather.\nIt may be wrong.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where, such as\nOslo."},
                    "days": {"type": "integer", "description": "how many.", "default": 3},
                    "unit": {"enum": ["c", "f"], "type": "string", "default": "c"},
                },
                "required": ["city"],
            },
        },
    }


@pytest.mark.parametrize(
    ("function", "description", "properties"),
    [
        (numpy, "Forecast the weather.", {"city": {"type": "string", "description": "where"}}),
        (plain, "Forecast the weather.", {"city": {"type": "string"}, "copy": {"type": "boolean", "default": False}}),
        (silent, "", {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}}),
        (annotated, "", {"n": {"type": "integer", "minimum": 1, "description": "how many"}}),
        (partial(plain, "Oslo"), "Forecast the weather.", {"copy": {"type": "boolean", "default": False}}),
    ],
)
def test_docstrings_of_any_style_describe_a_tool(function, description, properties):
    found = schema_of(function)
    assert (found["description"], found["parameters"].get("properties")) == (description, properties)


def test_a_schema_has_enums_and_dataclasses_and_no_titles():
    def book(title: str, at: Point) -> str:
        return title

    text = json.dumps(schema_of(rich))
    assert '"enum": ["m", "ft"]' in text
    assert '"title"' not in text
    assert schema_of(book)["parameters"]["properties"]["title"] == {"type": "string"}


@pytest.mark.parametrize(
    ("function", "arguments", "output"),
    [
        (google, {"city": "Oslo"}, "Oslo 3 c"),
        (google, {"city": "Oslo", "days": "2"}, "Oslo 2 c"),  # models write numbers as texts
        (silent, "", "null"),
        (silent, {"a": None}, "null"),
        (annotated, {"n": 2}, "[0,1]"),
        (
            rich,
            {"unit": "ft", "at": {"x": 1}, "numbers": ["1", 2], "table": {"a": 1}, "options": {"deep": True}},
            '{"unit":"FOOT","x":2.0,"sum":3,"table":{"a":1.0},"options":{"deep":true}}',
        ),
        (google, "{", "error: wrong arguments of google: Invalid JSON: EOF while parsing an object at line 1 column 1"),
        (
            google,
            '{"city": "Oslo", "days": 1e400}',
            "error: wrong arguments of google: days: Input should be a finite number, got inf",
        ),
        (
            rich,
            '{"unit": "ft", "at": {"x": 1}, "numbers": [], "table": {"a": NaN}, "options": {}}',
            "error: wrong arguments of rich: NaN and Infinity are not JSON: expected value at line 1 column 62",
        ),
        (google, "[1]", "error: wrong arguments of google: Input should be an object, got [1]"),
        (google, {}, "error: wrong arguments of google: city: Field required"),
        (
            google,
            {"city": "Oslo", "days": "many", "to": 1},
            "error: wrong arguments of google: days: Input should be a valid integer, unable to parse string as an "
            "integer, got 'many'; to: Extra inputs are not permitted, got 1",
        ),
        (
            annotated,
            {"n": 0},
            "error: wrong arguments of annotated: n: Input should be greater than or equal to 1, got 0",
        ),
    ],
)
def test_arguments_are_checked_and_converted_and_results_are_text(function, arguments, output):
    assert call(function, arguments) == output


def test_a_tools_error_reaches_the_model_but_not_a_worlds_failure():
    def divide(a: int) -> float:
        return 1 / a

    def leave() -> None:
        raise SystemExit

    def stop() -> int:
        return next(iter([]))

    def broken() -> None:
        raise ForgeError("the database is gone")

    async def late() -> None:
        raise KeyError("x")

    def give(kind: str) -> object:
        cycle: dict[str, object] = {}
        cycle["me"] = cycle
        return b"\xff\x00" if kind == "bytes" else cycle

    for kind in ("bytes", "cycle"):
        assert call(give, {"kind": kind}).startswith("error: the result of give has no JSON form: ")
    assert call(divide, {"a": 0}) == "error: ZeroDivisionError: division by zero"
    assert call(leave, {}) == "error: SystemExit"
    assert call(stop, {}) == "error: RuntimeError: StopIteration"
    assert call(late, {}) == "error: KeyError: 'x'"
    with pytest.raises(ForgeError, match="the database is gone"):
        call(broken, {})


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_plain_tool_blocks_nobody_and_one_that_hangs_is_left_behind():
    let_go, left = threading.Event(), list[threading.Thread]()

    def hang() -> str:
        left.append(threading.current_thread())
        let_go.wait()
        return "late"

    async def pause() -> str:
        await asyncio.Event().wait()
        return "never"

    def thread() -> str:
        return "main" if threading.current_thread() is threading.main_thread() else "own"

    stuck = [Tool(hang).call("{}", timeout_s=0.2) for _ in range(40)]  # more than a pool of threads has
    outputs = await asyncio.gather(*stuck, Tool(pause).call("{}", timeout_s=0.2), Tool(thread).call("{}", timeout_s=30))
    let_go.set()
    for each in left:
        each.join()
    assert outputs == ["error: hang took longer than 0.2 s"] * 40 + ["error: pause took longer than 0.2 s", "own"]


def test_a_tool_that_overcame_an_error_still_has_its_limit():
    async def search() -> str:
        await overcome_an_error()
        await asyncio.Event().wait()
        return "never"

    assert call(search, {}, 0.05) == "error: search took longer than 0.05 s"


async def test_a_tool_pickles():
    tool = pickle.loads(pickle.dumps(Tool(google)))
    assert await tool.call('{"city": "Oslo"}', timeout_s=30) == "Oslo 3 c"


def untyped(a, b: int):  # type: ignore[no-untyped-def]
    return a


def many(*args: int) -> None: ...


def unknown(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821


def unwritable(a: threading.Lock) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "the parameter a of the tool untyped has no type hint"),
        (many, r"the tool many has the parameter \*args: int, which has no JSON schema"),
        (unknown, "a type hint of the tool unknown cannot be resolved: name 'Nowhere' is not defined"),
        (unwritable, "the type hints of the tool unwritable have no JSON form"),
        (7, "the tool 7 is not a function"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(function, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Tool(function)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("expression", "output"),
    [
        ("3 * (4 + 1)", "15"),
        ("10 / 4", "2.5"),
        ("10 / 5", "2"),
        ("0.1 + 0.2", "0.3"),
        ("2^10", "1024"),
        ("7 \N{MULTIPLICATION SIGN} 6", "42"),
        ("-7 // 2 % 5", "1"),
        ("sqrt(2) + max(1, 2)", "3.4142135624"),
        ("1 / 0", "error: ZeroDivisionError: division by zero"),
        ("1000 * 1.05 ** 10", "1628.8946267774"),
        ("10.0 ** 400", "error: OverflowError: (34, 'Numerical result out of range')"),
        ("0 ** -1", "error: ZeroDivisionError: 0.0 cannot be raised to a negative power"),
        ("-" * 499 + "1", "-1"),
        ("9 ** 9 ** 9", "error: ValueError: the power is too large"),
        ("factorial(10 ** 6)", "error: ValueError: factorial takes numbers up to 400"),
        ("round(5, -999999999)", "error: ValueError: round takes up to 400 digits"),
        ("9" * 501, "error: ValueError: the expression has more than 500 characters"),
        ("(-8) ** 0.5", "error: ValueError: (1.7319121124709868e-16+2.8284271247461903j) is not a finite number"),
        ("__import__('os').system('id')", "error: ValueError: \"__import__('os').system('id')\" is not arithmetic"),
        ("[].append", "error: ValueError: '[].append' is not arithmetic"),
        ("a + 1", "error: ValueError: 'a' is not arithmetic"),
        ("True + 1", "error: ValueError: 'True' is not arithmetic"),
        ("1 +", "error: ValueError: '1 +' is not an arithmetic expression"),
        ("1e999", "error: ValueError: inf is not a finite number"),
        ("(" * 250, "error: ValueError: " + repr("(" * 250) + " is not an arithmetic expression"),
    ],
)
def test_a_calculator_computes_arithmetic_and_nothing_else(expression, output):
    assert call(calculator, {"expression": expression}) == output
