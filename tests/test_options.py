"""The one reader of options: from the text of a flag to the arguments of the class or function that it names."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest

from forge_rl.errors import ConfigError
from forge_rl.flags.options import build, read_options
from forge_rl.flags.texts import FlagText, parse


@dataclass(frozen=True, kw_only=True)
class Lamp:
    watts: int = 5
    colour: str = "white"


@dataclass(frozen=True, kw_only=True)
class Room:
    size: float
    lamp: Lamp = field(default_factory=Lamp)


class House:
    def __init__(self, street: str, *, settings: Lamp | None = None, number: int = 1) -> None:
        self.street, self.settings, self.number = street, settings, number


def anything(street: str, **options: object) -> dict[str, object]:
    return {"street": street, **options}


def untyped(a, b=2):  # type: ignore[no-untyped-def]
    return a, b


def failing(size: int = 1) -> None:
    raise RuntimeError("no room")


def text(options: str) -> FlagText:
    return parse(f"thing:{options}", "--flag", bundled=["thing"], takes_weight=False)


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (Room, "size=2", Room(size=2.0)),
        (Room, "size=2,lamp.watts=7", Room(size=2.0, lamp=Lamp(watts=7))),
        (
            functools.partial(Room, size=1.0, lamp=Lamp(colour="red")),
            "lamp.watts=7",
            Room(size=1.0, lamp=Lamp(watts=7, colour="red")),
        ),
        (untyped, "a=[x,1]", (["x", 1], 2)),
    ],
)
def test_options_become_arguments_in_their_types(make: Any, options: str, expected: object):
    assert build(text(options), make) == expected


def test_fields_of_settings_are_options_and_arguments_by_place_are_none():
    house = build(text("watts=9,number=3"), House, "Elm")
    assert (house.street, house.settings, house.number) == ("Elm", Lamp(watts=9), 3)
    assert build(text("a.b=1,c=x"), anything, "Elm") == {"street": "Elm", "a.b": 1, "c": "x"}
    assert read_options(text("number=2"), House, "Elm")["number"] == 2


@pytest.mark.parametrize(
    ("make", "arguments", "options", "message"),
    [
        (Room, (), "sise=2", r"thing has no option 'sise'\n  thing:sise=2\n        \^{6}\n  hint: did you mean size\?"),
        (Room, (), "size=2,lamp.wats=1", r"no option 'lamp.wats'"),
        (Room, (), "size=big", r"size is 'big': Input should be a valid number"),
        (Room, (), "lamp.watts=1", r"thing needs size\n.*\n.*\n  hint: write thing:size=\.\.\."),
        (House, ("Elm", "Oak"), "number=1", r"thing takes no 'Oak'"),
        (House, ("Elm",), "settings=1", r"no option 'settings'"),
        (failing, (), "size=1", r"--flag thing cannot be made: RuntimeError: no room"),
        (7, (), "size=1", r"thing is 7, from which nothing can be made"),
    ],
)
def test_an_option_that_does_not_fit_is_named_with_its_place_and_a_hint(
    make: Any, arguments: tuple[str, ...], options: str, message: str
):
    with pytest.raises(ConfigError, match=message) as caught:
        build(text(options), make, *arguments)
    assert caught.value.hint
