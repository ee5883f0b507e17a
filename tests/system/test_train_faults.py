import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.system.faults.disks import fill, refuse_a_small_disk, truncate
from tests.system.faults.interruptions import (
    damage,
    hang,
    kill_all,
    kill_rank,
    kill_torchrun,
    signal_rank,
    signal_twice,
)
from tests.system.faults.jobs import Workplace
from tests.system.faults.kills import may_mount
from tests.system.faults.moves import BOTH, move
from tests.system.faults.sick import leave_out, not_finite_for_ever, roll_back
from tests.system.faults.train import PRESSED, WITH_LOADERS, interrupt

pytestmark = pytest.mark.system

INTERRUPTIONS = [signal_rank, kill_torchrun, signal_twice, hang, kill_rank, damage]
TODAY = datetime.now(UTC).toordinal()
# One a day, each of them every sixth day; ``make soak`` has all of them, many times.
TODAYS = [random.Random(TODAY // 6).sample(INTERRUPTIONS, 6)[TODAY % 6]]
LOOPS: dict[str, Callable[[Workplace], dict[str, Any]]] = {
    "asked_to_leave_or_torn_away_it_goes_on_and_ends_bit_identical": lambda place: interrupt(
        place, len(TODAYS), TODAY, TODAYS, most_of_a_run=len(TODAYS)
    ),
    "killed_at_any_moment_three_ranks_go_on_and_end_bit_identical": lambda place: interrupt(
        place, 1, 1, [kill_all], ranks=3, settings=PRESSED | WITH_LOADERS
    ),
    "killed_after_a_rollback_it_is_still_rolled_back": lambda place: roll_back(place, 1, 7),
    "a_run_goes_on_with_other_ranks_and_strategies": lambda place: move(place, BOTH, 9),
    "steps_that_are_sick_on_one_rank_are_left_out_by_all": lambda place: leave_out(place, 1, 4),
    "a_loss_that_is_never_finite_again_ends_the_run_for_good": lambda place: not_finite_for_ever(place, 1, 5),
    "a_checkpoint_cut_short_anywhere_is_passed_over": lambda place: truncate(place, 20, 8),
}
ON_A_SMALL_DISK: dict[str, Callable[[Workplace], dict[str, Any]]] = {
    "a_disk_that_is_full_for_a_while_costs_a_save_and_nothing_else": fill,
    "a_disk_that_does_not_hold_two_checkpoints_is_refused_at_the_start": refuse_a_small_disk,
}


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """What comes of the loops that were selected, three at a time: one alone leaves cores idle half of the time."""
    place = Workplace(tmp_path_factory.mktemp("trainings"))
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    loops = {name: loop for name, loop in (LOOPS | ON_A_SMALL_DISK).items() if name in names}
    if not may_mount():
        loops = {name: loop for name, loop in loops.items() if name in LOOPS}
    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(loop, place) for name, loop in loops.items()}
        pool.shutdown(cancel_futures=True)


LONGEST = "a_run_goes_on_with_other_ranks_and_strategies"
QUICK_AND_SLOW = [pytest.param(name, marks=pytest.mark.slow) if name == LONGEST else name for name in LOOPS]


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_training(outcomes: dict[str, Future], name):
    print("interruptions of today:", TODAY, TODAYS)
    assert outcomes[name].result()["faults"]


@pytest.mark.skipif(not may_mount(), reason="needs root to mount")
@pytest.mark.parametrize("name", ON_A_SMALL_DISK)
def test_training_on_a_small_disk(outcomes: dict[str, Future], name):
    assert outcomes[name].result()["faults"]
