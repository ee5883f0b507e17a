"""Tests of one row of the table of capabilities, for any machine."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import pytest

from testbed.capabilities.values import Capability, Cell, Refused


def sample_marks(cell: Cell, sample: AbstractSet[str]) -> list[pytest.MarkDecorator]:
    """Return the marks of a cell: the whole table is for ``make soak``."""
    marks = []
    if cell.is_slow or cell.name not in sample:
        marks.append(pytest.mark.soak)
    if cell.is_refused:
        reason = f"autotune does not offer {cell.name} yet"
        marks.append(pytest.mark.xfail(strict=True, raises=Refused, reason=reason))
    return marks


def capability_test(
    row: Capability, cells: Sequence[Cell], sample: AbstractSet[str]
) -> Callable[..., None]:
    """Return a test of a capability, with a parameter for each kind of subject.

    It uses a fixture ``places``, which has a folder by kind.
    """

    @pytest.mark.parametrize(
        "kind",
        [
            pytest.param(
                cell.subject.kind,
                id=cell.subject.kind,
                marks=sample_marks(cell, sample),
            )
            for cell in cells
            if cell.capability is row
        ],
    )
    def test(places, kind):
        row.check(places[kind].result_of(row))

    return test
