"""Memory budgets on a CPU begin with the allocators in the same state."""

import json
import subprocess
import sys

from autotune.trials.jobs.budget import LARGE_BLOCK_BYTES

MIB = 2**20
BLOCK_BYTES = 100_000
"""Size of a block that malloc's heap serves."""
# Python's own allocator divides arenas of 1 MiB into pools of 16 KiB. Its largest
# objects take 512 bytes, such as ``bytes`` of length 479; a pool has room for 31.
GROWTH_AFTER_CLEANING = f"""
import json

from autotune.trials.jobs import budget
from trainer.formats.process_status import status_bytes

OBJECTS_PER_ARENA = 64 * 31
kept = []

def growth_bytes(count, length):
    before_bytes = status_bytes("VmSize")
    kept.append([bytes(length) for _ in range(count)])
    return status_bytes("VmSize") - before_bytes

# Leave free memory in many pools, as earlier trials may.
fragmented = [bytes(479) for _ in range(20_000)]
del fragmented[::2]
budget.CpuBudget(2**40, clean=True)
print(
    json.dumps(
        {{
            "first_arena": growth_bytes(OBJECTS_PER_ARENA, 479),
            "second_arena": growth_bytes(OBJECTS_PER_ARENA, 479),
            "block": growth_bytes(1, {BLOCK_BYTES}),
        }}
    )
)
"""


def test_allocators_have_equal_room_in_every_trial():
    """Check the free memory that cleaning leaves in a process.

    Python's allocator has nearly an arena free, and the heap of malloc has nothing.
    Otherwise the needs of equal trials would differ by 1 MiB of Python's allocator, and
    by 128 KiB of the heap, depending on the past of the process.
    """
    process = subprocess.run(
        [sys.executable, "-c", GROWTH_AFTER_CLEANING],
        capture_output=True,
        text=True,
        check=True,
    )
    grown_bytes = json.loads(process.stdout)
    # The objects of an arena fit into the free room, but for their list and some pages.
    assert grown_bytes["first_arena"] < 32 * 1024
    # As many more need an arena of their own.
    assert grown_bytes["second_arena"] >= MIB
    # The heap grows by the block itself, rounded to pages.
    assert BLOCK_BYTES < LARGE_BLOCK_BYTES
    assert 0.9 * BLOCK_BYTES < grown_bytes["block"] < 1.1 * BLOCK_BYTES
