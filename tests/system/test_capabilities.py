"""Every capability for every kind of subject, on this machine's CPU.

``testbed.capabilities`` is the table. ``make test`` runs a sample of its cells,
which has every capability and every kind, and ``make soak`` all of them.
"""

from functools import partial

import pytest

from testbed.capabilities.table import (
    CAPABILITIES,
    SUBJECTS,
    cells,
    covering_sample,
)
from testbed.capabilities.values import Workplace, run_on_cpu
from tests.capability_tests import capability_test, sample_marks

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Workplace]:
    """Return a folder for each kind of subject, which all of its cells share."""
    made = {}
    for subject in SUBJECTS:
        folder = tmp_path_factory.mktemp(subject.kind)
        made[subject.kind] = Workplace(
            subject=subject,
            device="cpu",
            memory="32MiB",
            ranks_memory="128MiB",
            folder=folder,
            run=partial(run_on_cpu, folder),
        )
        made[subject.kind].prepare()
    return made


CELLS = list(cells("cpu"))
SAMPLE = covering_sample("cpu")
for row in CAPABILITIES:
    # A function for each row, so that tests are called capability[subject].
    globals()[f"test_{row.name}"] = capability_test(row, CELLS, SAMPLE)


def test_sample_has_every_row_and_column():
    chosen = [cell for cell in CELLS if cell.name in SAMPLE]
    quick = {cell.capability.name for cell in CELLS if not cell.is_slow}
    assert {cell.capability.name for cell in chosen} == quick
    assert {cell.subject.kind for cell in chosen} == {
        subject.kind for subject in SUBJECTS
    }


def test_other_cells_run_in_soak():
    for cell in CELLS:
        marks = {mark.name for mark in sample_marks(cell, SAMPLE)}
        assert ("soak" in marks) == (cell.name not in SAMPLE)
