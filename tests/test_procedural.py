"""Our scorers of reasoning-gym's data sets against its own, on answers that a model gives in good faith."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import reasoning_gym

from forge_rl.rewards.expressions import arithmetic, formula, literal
from forge_rl.rewards.procedural import OWN
from forge_rl.rewards.verifiers import verify

PARAMS: dict[str, dict[str, Any]] = {
    "n_queens": {"n": 6, "max_remove": 5},
    "puzzle24": {"max_value": 8},
    "polynomial_multiplication": {"allow_cross_variable_product": True, "allow_multivariate_polynomials": True},
}


def honest(dataset: str, gold: str, entry: dict[str, Any]) -> Iterator[str]:
    """The right answer and wrong ones, in several ways to write them."""
    yield from (gold, gold + " ", gold + "\n", f"({gold})", "", "I do not know", "42", f"{gold} = 24", gold[:-2])
    numbers = re.findall(r"\d+", gold)
    yield from (gold.replace(numbers[0], "7", 1),) if numbers else ()
    yield from (gold.replace("**", "^"), gold.replace("*", "\N{MULTIPLICATION SIGN}"), gold.replace(" ", ""))
    match dataset:
        case "n_queens" | "binary_matrix":
            rows = [row.split() for row in gold.split("\n")]
            yield from (str(rows), str(tuple(map(tuple, rows))), gold.replace(" ", ", "), f"[[{gold}]]")
            yield from (str(rows[::-1]), str(["".join(row) for row in rows]), f"[{rows}]", f" {rows}")
        case "spiral_matrix":
            yield from (f"[{', '.join(numbers)}]", ", ".join(numbers), f"({','.join(numbers)})", str(numbers))
        case "string_insertion":
            yield from (repr(gold), str(list(gold)), str(list(gold[::-1])), str(tuple(gold)))
        case "countdown" | "puzzle24":
            operands = entry["metadata"]["numbers"]
            yield from (" + ".join(map(str, operands)), "*".join(map(str, operands)), f"-(-({gold}))", f"2*({gold})/2")
            yield from (
                f"{gold} + 0.4",
                "6*4*1*1",
                "7*7/2*1",
                "1/(2-2)",
                "2**3*3",
                "x + 24",
                " ".join(map(str, operands)),
            )
        case "polynomial_multiplication":
            yield from (entry["metadata"]["polynomial_expr"], f"{gold} + 1", f"2*({gold})/2", f"({gold})*1.0", "x*(y")
            yield from (" + ".join(f"({term})" for term in gold.split(" + ")[::-1]), "3*E", "2x")
        case _:
            x = entry["metadata"]["variable"]
            plain = gold.removesuffix(" + C")
            yield from (plain, f"C + {plain}", f"{plain} + c", f"{plain} + 3", f"{plain} + {x}", f"K + 2*({plain})/2")
            yield from (f"0.5*({plain}) + ({plain})/2", entry["metadata"]["integrand"], f"exp({x})", f"E**{x} + C")
            yield from (f"log(Abs({x})) + C", f"ln({x}, 2)", f"sin({x})**2 + cos({x})**2 + {plain}", f"|{x}|", f"-2{x}")
            yield from (f"sqrt({x}**2)", f"arcsin({x}) + C", f"1/2*{x}")


@pytest.mark.parametrize("dataset", sorted(OWN))
def test_honest_answers_score_as_with_reasoning_gym(dataset: str):
    params = PARAMS.get(dataset, {})
    entries = reasoning_gym.create_dataset(dataset, seed=5, size=3, **params)
    scores = set()
    for entry in entries:
        if "Integral" in entry["answer"]:  # sympy could not tell, and so nobody can be right
            continue
        for answer in dict.fromkeys(honest(dataset, str(entry["answer"]), entry)):
            theirs = entries.score_answer(answer, entry)
            if dataset == "puzzle24" and sorted(map(int, re.findall(r"\d+", answer))) != sorted(
                entry["metadata"]["numbers"]
            ):
                theirs = 0.01  # where reasoning-gym takes any four numbers
            assert verify(dataset, params, entry, answer) == theirs, (dataset, answer, entry["answer"])
            scores.add(theirs)
    assert len(scores) > 1


@pytest.mark.parametrize("dataset", sorted(OWN))
def test_the_right_answer_scores_one(dataset: str):
    for entry in reasoning_gym.create_dataset(dataset, seed=1, size=3):
        assert verify(dataset, {}, entry, entry["answer"]) == (0.0 if "Integral" in entry["answer"] else 1.0)


def test_an_answer_that_leaves_the_work_to_sympy_is_wrong():
    [entry] = reasoning_gym.create_dataset("polynomial_multiplication", seed=1, size=1)
    expression = entry["metadata"]["polynomial_expr"]
    assert verify("polynomial_multiplication", {}, entry, f"expand({expression})") == 0.0
    [entry] = reasoning_gym.create_dataset("simple_integration", seed=1, size=1)
    assert verify("simple_integration", {}, entry, f"Integral({entry['metadata']['integrand']}, x)") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os')", "().__class__", "[].append(1)", "lambda: 1", "x if x else y", "[x for x in y]", "f'{x}'"),
        *("x.y", "x[0]", "(x := 1)", "x or y", "x == y", "x % y", "x // y", "x @ y", "x << y", "~x", "not x", "'a'"),
        *(
            "1j",
            "True",
            "None",
            "...",
            "sin(x, y)",
            "sin(x=1)",
            "sin(*x)",
            "N('1')",
            "S('1')",
            "sympify('1')",
            "eval(x)",
        ),
        *(
            "open('f')",
            "exec(x)",
            "print(1)",
            "diff(x)",
            "Function('f')(x)",
            "Symbol('x')",
            "sin",
            "1 2",
            "",
            "\0",
            "x\n+1",
        ),
        *("9**9**9", "9**(10**6)", "(2**4000)*(2**4000)*9**9", "1" * 5000, "9" * 30_000, "-" * 15_000 + "1"),
        *("-" * 150 + "1", "+".join(["1"] * 6000), "x**1001", "0.5**(10**9)", "1/10**5000"),
    ],
)
def test_what_is_no_bounded_formula_is_refused(text: str):
    with pytest.raises(ValueError, match=r"\w"):
        arithmetic(text)
    with pytest.raises(ValueError, match=r"\w"):
        formula(text, {})


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os')", "[open('f')]", "[1 for x in y]", "x"),
        *("[" * 20_000, "-" * 20_000 + "1", "1" * 30_000),
    ],
)
def test_what_is_no_literal_is_refused(text: str):
    with pytest.raises(ValueError, match=r"\w"):
        literal(text)
