import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.trials.decide.least_time import (
    LEAST_PROBES,
    LEAST_WINDOWS,
    USUAL_S,
    least_s,
)
from autotune.tune.decide import left_s, share_s
from autotune.tune.values import BUDGET_WEIGHTS, Stage

NAMES = ("estimate", "probe", "explore", "workers", "network", "baseline", "report")
STATUSES = st.sampled_from(["waiting", "done", "skipped", "failed"])
NAMED = st.sampled_from(NAMES)
STAGE = st.builds(
    Stage, name=NAMED, model=st.just("a"), status=STATUSES, seconds=st.floats(0, 100)
)
STAGES = st.lists(STAGE, min_size=1)
LEFT = st.floats(-100, 3600)


def stages_of(*names, model="a", **values):
    return [Stage(name=name, model=model, **values) for name in names]


@given(st.lists(NAMED, min_size=1, max_size=10), st.floats(0, 7200))
def test_shares_fit_in_the_budget(names, budget_s):
    stages = stages_of(*names)
    remaining_s = budget_s
    for stage in stages:
        share = share_s(stages, stage, remaining_s)
        stage.seconds = USUAL_S[stage.name] if share is None else share
        stage.status = "done"
        remaining_s -= stage.seconds
    fixed_s = sum(USUAL_S.get(name, 0.0) for name in names)
    assert remaining_s >= -1e-6 - (fixed_s if budget_s < fixed_s else 0)


@given(STAGES, LEFT, st.floats(0, 3600))
def test_more_time_gives_larger_shares(stages, remaining_s, more):
    stages[0].status = "waiting"
    less, share = (
        share_s(stages, stages[0], seconds)
        for seconds in (remaining_s, remaining_s + more)
    )
    assert (less is None) == (share is None) == (stages[0].name not in BUDGET_WEIGHTS)
    assert less is None or 0 <= less <= share
    assert left_s(stages, remaining_s) >= 0
    for stage in stages:
        stage.status = "done"
    assert left_s(stages, remaining_s) == 0


@given(STAGES, LEFT)
def test_waiting_phases_share_the_time(stages, remaining_s):
    (workers,) = stages_of("workers")
    before = share_s([workers, *stages], workers, remaining_s)
    for stage in stages:
        stage.status = "skipped"
    after = share_s([workers, *stages], workers, remaining_s)
    assert before <= after + 1e-9
    assert after == pytest.approx(max(0.0, remaining_s))


def test_shares_follow_weights():
    stages = stages_of("explore", "workers", "network", "baseline", "report")
    remaining_s = 110 + USUAL_S["report"]
    assert [
        share_s(stages, stages[index], remaining_s) for index in (0, 3)
    ] == pytest.approx([40, 10])
    assert left_s(stages, remaining_s) == pytest.approx(remaining_s)
    stages = [
        *stages_of("probe", status="done", seconds=300.0),
        *stages_of("workers"),
        *stages_of("probe", model="b"),
    ]
    assert share_s(stages, stages[1], 400.0) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("name", "progress", "expected_s"),
    [
        ("probe", {"done": 4, "expected": 12}, 40.0),
        ("probe", {"done": 4}, USUAL_S["probe"] - 20.0),
        ("workers", {"done": 1, "expected": 100, "budget_s": 60.0}, 40.0),
        ("workers", {"done": 90, "expected": 100, "budget_s": 60.0}, 20.0 / 90 * 10),
    ],
    ids=["probe", "probe of unknown length", "workers", "workers near their budget"],
)
def test_estimate_follows_finished_trials(name, progress, expected_s):
    assert left_s(
        stages_of(name, status="running", seconds=20.0, **progress), 600.0
    ) == pytest.approx(expected_s)
    expected = {
        "baseline": LEAST_WINDOWS["baseline"] * 5.0,
        "probe": LEAST_PROBES * 3.0,
        "report": USUAL_S["report"],
    }
    assert {name: least_s(name, 3.0, 2.0) for name in expected} == expected
