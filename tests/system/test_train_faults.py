"""Training survives each kind of fault; ``make soak`` strikes at many more moments.

``FAULTS_SEED`` changes which interruption is drawn and when all faults strike.
"""

import os
import random
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from tests.system.faults.jobs import Workplace
from tests.system.faults.kills import may_mount
from tests.system.faults.train import BOTH, LOOPS, Loop, move

pytestmark = pytest.mark.system

SEED = int(os.environ.get("FAULTS_SEED", "9"))
# Each takes long, so that only one is drawn; ``make soak`` has all of them.
INTERRUPTIONS = [
    "signal to one rank",
    "torchrun dead",
    "second signal",
    "hung rank",
    "dead rank",
    "truncated checkpoint, resumed",
]
DRAWN_INTERRUPTION = random.Random(SEED).choice(INTERRUPTIONS)
DRAWN = "drawn interruption"
LONGEST = Loop("other ranks and strategies", partial(move, stages=BOTH), 1)
POINTS = {
    DRAWN: 1,
    "SIGKILL, 2 ranks": 1,
    "spike, rolled back": 1,
    LONGEST.name: 1,
    "sick steps, left out": 1,
    "sick for ever": 1,
    "truncated checkpoint": 20,
    "full disk": 1,
}
"""Faults to inject in each loop."""


@pytest.fixture(scope="module")
def figures_by_loop(request, tmp_path_factory):
    """Run the loops that were selected, three at a time.

    A single loop leaves cores idle half of the time.
    """
    workplace = Workplace(tmp_path_factory.mktemp("trainings"))
    loops = {loop.name: loop for loop in (*LOOPS, LONGEST)}
    loops[DRAWN] = loops[DRAWN_INTERRUPTION]
    selected = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path
    ]
    with ThreadPoolExecutor(3) as pool:
        yield {
            name: pool.submit(
                loops[name].run, workplace, points=POINTS[name], seed=SEED
            )
            for name in selected
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
def test_training_survives(figures_by_loop: dict[str, Future], name):
    # Shown if the test fails, so that it can be repeated.
    print(f"FAULTS_SEED={SEED}; {DRAWN}: {DRAWN_INTERRUPTION}")
    if name not in figures_by_loop:
        pytest.skip("needs root to mount")
    assert figures_by_loop[name].result()["faults"]
