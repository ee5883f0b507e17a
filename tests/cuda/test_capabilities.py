"""Every capability for every kind of subject, on pretended GPUs.

``testbed.capabilities`` is the table. ``make test-cuda`` runs a sample of its cells, in
which every kind occurs, and every capability that uses the device; ``make soak`` runs
all of them.
"""

import dataclasses
from functools import partial

import pytest

from testbed.capabilities.table import (
    CAPABILITIES,
    RANKS_PROFILE,
    SUBJECTS,
    cells,
    covering_sample,
)
from testbed.capabilities.values import Answer, Workplace
from testbed.nullgpu.machine import Machine
from tests.capability_tests import capability_test
from tests.cuda.test_commands import DRIVER

pytestmark = pytest.mark.cuda
MEMORY_BYTES = 1_500_000_000
RANKS_MEMORY_BYTES = 4_000_000_000
"""Memory of each of several GPUs, of which NCCL takes a gigabyte."""


def run_on_gpus(machine: Machine, words, variables) -> Answer:
    """Run ``autotune`` on pretended GPUs: as many as there are ranks."""
    changes = {"variables": machine.variables | variables}
    if RANKS_PROFILE["ddp"] in words or "--ranks" in words:
        changes |= {"devices": 2, "memory": RANKS_MEMORY_BYTES}
    ended = dataclasses.replace(machine, **changes).autotune(*words, timeout_s=900)
    return Answer(code=ended.code, out=ended.out, err=ended.err)


@pytest.fixture(scope="module")
def places(null_gpus) -> dict[str, Workplace]:
    """Return a folder for each kind of subject, which all of its cells share."""
    made = {}
    for subject in SUBJECTS:
        # With a real driver's version, commands that measure rates run to their end.
        machine = null_gpus(memory=MEMORY_BYTES, driver=DRIVER)
        made[subject.kind] = Workplace(
            subject=subject,
            device="cuda",
            memory=f"{MEMORY_BYTES}B",
            ranks_memory=f"{RANKS_MEMORY_BYTES}B",
            folder=machine.folder,
            run=partial(run_on_gpus, machine),
        )
        made[subject.kind].prepare()
    return made


CELLS = list(cells("cuda"))
for row in CAPABILITIES:
    # A function for each row, so that tests are called capability[subject].
    globals()[f"test_{row.name}"] = capability_test(row, CELLS, covering_sample("cuda"))
