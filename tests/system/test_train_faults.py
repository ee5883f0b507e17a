import random
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial

import pytest

from tests.system.faults.jobs import Workplace
from tests.system.faults.kills import may_mount
from tests.system.faults.train import BOTH, LOOPS, Loop, move

pytestmark = pytest.mark.system

INTERRUPTIONS = [
    "signal to one rank",
    "torchrun dead",
    "second signal",
    "hung rank",
    "dead rank",
    "truncated checkpoint, resumed",
]
TODAY = datetime.now(UTC).toordinal()
# One a day, each of them every sixth day; ``make soak`` has all of them, many times.
OF_TODAY = random.Random(TODAY // 6).sample(INTERRUPTIONS, 6)[TODAY % 6]
DRAWN = "an interruption of today"
LONGEST = Loop("other ranks and strategies", partial(move, stages=BOTH), 1)
POINTS = {
    DRAWN: 1,
    "SIGKILL, 3 ranks": 1,
    "spike, rolled back": 1,
    LONGEST.name: 1,
    "sick steps, left out": 1,
    "sick for ever": 1,
    "truncated checkpoint": 20,
    "full disk": 1,
}


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """What comes of the loops that were selected, three at a time: one alone leaves
    cores idle half of the time."""
    place = Workplace(tmp_path_factory.mktemp("trainings"))
    loops = {loop.name: loop for loop in (*LOOPS, LONGEST)}
    loops[DRAWN] = loops[OF_TODAY]
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path
    ]
    with ThreadPoolExecutor(3) as pool:
        yield {
            name: pool.submit(
                loops[name].run,
                place,
                points=POINTS[name],
                seed=TODAY if name == DRAWN else 9,
            )
            for name in names
            if may_mount() or not loops[name].needs_mount
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == LONGEST.name else name
        for name in POINTS
    ],
)
def test_training_survives(outcomes: dict[str, Future], name):
    print("interruption of today:", TODAY, OF_TODAY)
    if name not in outcomes:
        pytest.skip("needs root to mount")
    assert outcomes[name].result()["faults"]
