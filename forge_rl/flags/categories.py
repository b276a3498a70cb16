"""Categories of flags: whether a resumed run may change a flag, and whether another value makes it another run.

A flag's category is in the annotation of its field, as in `ranks: Operational[int] = 1`, or else the `CATEGORY` of its
class. A class that declares a field again inherits the field's category, and fields of a nested config the category of
the field that holds it. A flag without a category defines its run and cannot change.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias, TypeVar

T = TypeVar("T")


class Category(Enum):
    """What a flag's value means to a run."""

    DEFINING = "what a run computes, and part of its folder's name: never changes"
    TUNABLE = "what a run computes, but may change if --out names the run to resume; otherwise it is another run"
    OPERATIONAL = "where and how a run is computed: may change whenever it is resumed"
    OF_COMMAND = "of one command, such as what it displays: changes are not even reported"


Tunable: TypeAlias = Annotated[T, Category.TUNABLE]
Operational: TypeAlias = Annotated[T, Category.OPERATIONAL]
OfCommand: TypeAlias = Annotated[T, Category.OF_COMMAND]
