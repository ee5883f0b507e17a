"""What limits a run: simulated machines whose limit is known, and the edges of what a
record can tell."""

import functools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.advice.decide.bottleneck import (
    bottleneck_of_profile,
    bottleneck_of_run,
    parts_of_steps,
    uneven_share,
)
from autotune.advice.decide.gpu_counters import (
    Counters,
    counters_of_profile,
    data_share,
    with_counters,
)
from autotune.advice.sections import bottleneck_sentence
from autotune.advice.values import Bottleneck, StepPart
from testbed.examples.profiles import but, example_profile
from testbed.simulators.machines import CAUSES
from testbed.simulators.runs import SimulatedRun, simulated_run
from testbed.simulators.worlds import World, profile_of, run_of, settings
from trainer.record.run_record import StepRow

RUNS = 120
"""The benchmark takes 400."""


@functools.cache
def judged(seed: int) -> tuple[SimulatedRun, Bottleneck, Bottleneck]:
    """A run, and what is said of it and of its profile."""
    one = simulated_run(seed)
    of_run = bottleneck_of_run(one.run, counters_of_profile(one.profile))
    return one, of_run, bottleneck_of_profile(one.profile)


def test_at_least_97_per_cent_of_causes_are_found_in_runs_and_in_profiles_that_tell_them():
    every = [judged(seed) for seed in range(RUNS)]
    assert {one.cause for one, _, _ in every} == set(CAUSES)
    of_runs = [of_run.limit == one.cause for one, of_run, _ in every]
    of_profiles = [
        of_profile.limit == one.cause for one, _, of_profile in every if one.in_profile
    ]
    assert len(of_profiles) > RUNS / 2
    assert all(sum(right) >= 0.97 * len(right) for right in (of_runs, of_profiles))


@given(st.integers(0, RUNS - 1))
def test_parts_add_up_to_the_step_and_lie_within_their_bounds(seed):
    for found in judged(seed)[1:]:
        assert sum(part.share for part in found.parts) == pytest.approx(1, abs=0.02)
        assert list(found.parts) == sorted(found.parts, key=lambda part: -part.share)
        for part in found.parts:
            assert 0 <= part.share <= 1
            assert (
                part.low is None
                or part.high is None
                or part.low <= part.share <= part.high
            )


GPU, RANKS = World(), World(ranks_per_node=4)


def trained(world, steps=40, **changes):
    return run_of(world, settings(world, **changes), steps=steps)


def found_in(run, counters=None, **changed) -> Bottleneck:
    """What is said of a run with every row changed."""
    steps = [
        row.model_copy(update={key: told(row) for key, told in changed.items()})
        for row in run.steps
    ]
    found = bottleneck_of_run(replace(run, steps=tuple(steps)), counters)
    assert found is not None
    return found


def test_the_first_step_does_not_count_nor_what_a_later_row_tells_of_it():
    run = trained(GPU)
    slow = run.steps[0].model_copy(update={"data_wait_s": 1e6, "step_s": 1e6})
    assert found_in(replace(run, steps=(slow, *run.steps[1:]))).limit == "compute"
    assert bottleneck_of_run(replace(run, steps=run.steps[:1])) is None
    few = found_in(replace(run, steps=run.steps[:4]))
    # Of few steps no spread is known.
    assert all(part.low is None for part in few.parts)
    run = trained(RANKS, steps=12)
    unknown = dict.fromkeys(("slowest_rank", "slowest_rank_ratio"))
    first, second, *others = run.steps
    waits = [
        row.model_copy(update={"longest_data_wait_s": row.data_wait_s})
        for row in others
    ]
    late = second.model_copy(
        update={"longest_data_wait_s": 100.0, "longest_data_wait_rank": 1}
    )
    assert (
        found_in(
            replace(run, steps=(first.model_copy(update=unknown), late, *waits))
        ).limit
        == "compute"
    )


def test_another_rank_that_waits_for_its_loader_is_no_slow_network():
    run = trained(RANKS)
    late_s = 0.5 * run.steps[0].step_s
    found = found_in(
        run,
        step_s=lambda row: row.step_s + late_s,
        longest_data_wait_s=lambda row: row.data_wait_s + late_s,
        communication_s=lambda row: (row.communication_s or 0.0) + late_s,
        longest_data_wait_rank=lambda _: 2,
    )
    assert (found.limit, found.part("data loading").share) == (
        "data loading",
        pytest.approx(1 / 3, abs=0.03),
    )
    assert found.part("network").share < 0.02
    # And a wait of all ranks counts once.
    run = trained(replace(RANKS, load_s_per_row=2e-3))
    assert found_in(run, longest_data_wait_s=lambda row: row.data_wait_s) == found_in(
        run
    )


@pytest.mark.parametrize(("workers", "limit"), [(2, "data loading"), (0, "network")])
def test_a_loader_that_works_ahead_sets_the_pace_however_long_other_waits_are(
    workers, limit
):
    run = trained(World(gpu_name=None, nodes=2), data__num_workers=workers)
    step_s = run.steps[0].step_s
    waits = {
        "data_wait_s": 0.5 * step_s,
        "communication_s": 1.0 * step_s,
        "step_s": 2.5 * step_s,
    }
    changed = {
        key: lambda _, value=value: value
        for key, value in (waits | {"slowest_rank_ratio": 1.0}).items()
    }
    assert found_in(run, **changed).limit == limit


def test_counters_tell_launches_from_computing_and_what_cannot_be_told_apart_is_said():
    found = found_in(
        trained(World(nodes=2, node_bytes_per_s=1e11)), communication_s=lambda _: None
    )
    assert any("gradient" in words for words in found.untold)
    found = found_in(
        trained(GPU),
        Counters(busy_share=0.5, tensor_share=0.2, memory_share=0.2, source="counters"),
    )
    assert found.limit == "launch-bound"
    assert not any("launches" in words for words in found.untold)


def test_how_far_from_the_roof_is_told_where_windows_counted_it_and_a_profile_without_a_sweep_says_nothing():
    assert (
        bottleneck_of_profile(but(example_profile(), evidence={"workers": None}))
        is None
    )
    profile = profile_of(GPU, settings(GPU))
    assert bottleneck_of_profile(profile).mfu is None
    flops = [0.38 * 835e12, 0.42 * 835e12]
    rows = [
        row.model_copy(update={"model_flops_per_s_per_rank": flops})
        for row in profile.evidence.workers.rows
    ]
    workers = profile.evidence.workers.model_copy(update={"rows": rows})
    found = bottleneck_of_profile(but(profile, evidence={"workers": workers}))
    # Two windows show no spread.
    assert (found.mfu.value, found.mfu.low) == (pytest.approx(0.4), None)
    assert bottleneck_sentence(None) == "Bottleneck: not measured"
    assert bottleneck_sentence(replace(found, decided=False)).startswith(
        "Bottleneck (not certain): GPU"
    )


def rows(**changes: object) -> list[StepRow]:
    return [
        row.model_copy(update=changes)
        for row in trained(World(ranks_per_node=2, slow_rank=1.5), steps=12).steps
    ]


def share(of: list[StepRow], cause: str) -> float:
    return next(
        part.share for part in parts_of_steps(of, "x", 1.0) if part.cause == cause
    )


@pytest.mark.parametrize(
    ("changes", "untold", "cause"),
    [
        ({}, ("slowest_rank", "slowest_rank_ratio"), "straggler"),
        (
            {"longest_data_wait_s": 0.2 * rows()[0].step_s},
            ("longest_data_wait_s",),
            "data loading",
        ),
    ],
)
def test_rows_that_do_not_tell_of_all_ranks_yet_are_taken_for_like_the_others(
    changes, untold, cause
):
    told = rows(**changes)
    late = [row.model_copy(update=dict.fromkeys(untold)) for row in told[:6]] + told[6:]
    assert share(late, cause) == pytest.approx(share(told, cause), rel=0.05)


def test_only_another_slow_rank_every_time_is_uneven_and_only_where_rows_are_alike():
    assert uneven_share(rows()) == 0
    turns = [
        row.model_copy(update={"slowest_rank": number % 2})
        for number, row in enumerate(rows())
    ]
    assert uneven_share(turns) > 0.1
    widths = [
        row.model_copy(update={"padded_tokens": 1000 + number})
        for number, row in enumerate(turns)
    ]
    assert uneven_share(widths) == 0


@pytest.mark.parametrize(
    ("waits", "ratio", "expected"),
    [
        (0.8, 0.9, 0.1),  # of ranks that wait at once counts once
        (0.001, 0.97, 0.001),  # slower without waits is slower by chance
    ],
)
def test_data_share_is_what_windows_lose_by_waiting(waits, ratio, expected):
    row = example_profile().evidence.workers.rows[0]
    found = data_share(
        row.model_copy(update={"data_wait_share": waits, "ratio_to_cached": ratio})
    )
    assert found == pytest.approx(expected)


shares = st.floats(0, 0.3)


def told(
    counters: dict[str, float], uneven: float = 0.0, **known: float
) -> dict[str, float]:
    """Shares by cause, of parts and counters."""
    parts = [StepPart(cause=cause, share=share) for cause, share in known.items()]  # type: ignore[arg-type]
    return {
        one.cause: one.share
        for one in with_counters(parts, Counters(**counters, source="x"), uneven)[0]
    }


def test_what_is_known_of_waits_and_updates_is_no_wait_of_computing_for_launches_or_memory():
    counters = {"busy_share": 0.54, "tensor_share": 0.4, "memory_share": 0.2}
    assert told(counters, straggler=0.4)["launch-bound"] == pytest.approx(0, abs=1e-9)
    assert told(counters, straggler=0.0)["launch-bound"] == pytest.approx(0.4)
    # Ranks that wait for another one every time wait for programs.
    found = told({"busy_share": 0.6}, 0.3, straggler=0.3, network=0.1)
    assert (found["straggler"], found["network"]) == (0, pytest.approx(0.1))
    assert found["launch-bound"] >= 0.3
    counters = {"busy_share": 0.95, "tensor_share": 0.35, "memory_share": 0.52}
    assert told(counters, **{"optimizer step": 0.5})["memory"] < 0.05
    assert told(counters, update=0.0)["memory"] > 0.4


@given(shares, shares, shares, *[st.floats(0, 1)] * 4)
def test_parts_are_never_more_than_the_step_and_more_traffic_is_never_less_waiting_for_memory(
    waits, updates, padding, busy, tensor, memory, other
):
    counters = {"busy_share": busy, "tensor_share": tensor, "memory_share": memory}
    found = told(
        counters, network=waits, update=updates, padding=padding * (1 - waits - updates)
    )
    assert all(share >= 0 for share in found.values())
    assert sum(found.values()) <= 1 + 1e-9
    fixed, traffic = {"busy_share": 0.9, "tensor_share": 0.4}, sorted((memory, other))
    less, more = (told(fixed | {"memory_share": one})["memory"] for one in traffic)
    assert less <= more
