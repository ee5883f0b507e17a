"""The bottleneck of runs on simulated machines, where the true limit is known."""

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
from autotune.evidence.advice import Bottleneck, StepPart
from testbed.examples.profiles import but, example_profile
from testbed.simulators.machines import CAUSES
from testbed.simulators.runs import SimulatedRun, simulated_run
from testbed.simulators.worlds import World, profile_of, run_of, settings
from trainer.formats.run_record import StepRow

RUNS = 120
"""The benchmark takes 400."""


@functools.cache
def judged(seed: int) -> tuple[SimulatedRun, Bottleneck, Bottleneck]:
    """Return a run, its bottleneck, and the one of its profile."""
    simulated = simulated_run(seed)
    of_run = bottleneck_of_run(simulated.run, counters_of_profile(simulated.profile))
    return simulated, of_run, bottleneck_of_profile(simulated.profile)


def test_finds_97_per_cent_of_causes():
    every = [judged(seed) for seed in range(RUNS)]
    assert {simulated.cause for simulated, _, _ in every} == set(CAUSES)
    of_runs = [of_run.limit == simulated.cause for simulated, of_run, _ in every]
    of_profiles = [
        of_profile.limit == simulated.cause
        for simulated, _, of_profile in every
        if simulated.in_profile
    ]
    assert len(of_profiles) > RUNS / 2
    assert all(sum(right) >= 0.97 * len(right) for right in (of_runs, of_profiles))


@given(st.integers(0, RUNS - 1))
def test_parts_stay_within_bounds(seed):
    for bottleneck in judged(seed)[1:]:
        assert sum(part.share for part in bottleneck.parts) == pytest.approx(
            1, abs=0.02
        )
        assert list(bottleneck.parts) == sorted(
            bottleneck.parts, key=lambda part: -part.share
        )
        for part in bottleneck.parts:
            assert 0 <= part.share <= 1
            assert (
                part.low is None
                or part.high is None
                or part.low <= part.share <= part.high
            )


GPU = World()
RANKS = World(ranks_per_node=4)


def trained(world, steps=40, **changes):
    return run_of(world, settings(world, **changes), steps=steps)


def bottleneck_in(run, counters=None, **changed) -> Bottleneck:
    """Return the bottleneck of a run with every step changed."""
    steps = [
        row.model_copy(update={key: value_of(row) for key, value_of in changed.items()})
        for row in run.steps
    ]
    bottleneck = bottleneck_of_run(replace(run, steps=tuple(steps)), counters)
    assert bottleneck is not None
    return bottleneck


def test_ignores_first_step():
    run = trained(GPU)
    slow = run.steps[0].model_copy(update={"data_wait_s": 1e6, "step_s": 1e6})
    assert bottleneck_in(replace(run, steps=(slow, *run.steps[1:]))).limit == "compute"
    assert bottleneck_of_run(replace(run, steps=run.steps[:1])) is None


def test_few_steps_have_no_spread():
    run = trained(GPU)
    few = bottleneck_in(replace(run, steps=run.steps[:4]))
    # Of few steps no spread is known.
    assert all(part.low is None for part in few.parts)


def test_unknown_slowest_rank_is_no_straggler():
    run = trained(RANKS, steps=12)
    unknown = dict.fromkeys(("slowest_rank", "slowest_rank_ratio"))
    first, second, *later = run.steps
    waits = [
        row.model_copy(update={"longest_data_wait_s": row.data_wait_s}) for row in later
    ]
    late = second.model_copy(
        update={"longest_data_wait_s": 100.0, "longest_data_wait_rank": 1}
    )
    assert (
        bottleneck_in(
            replace(run, steps=(first.model_copy(update=unknown), late, *waits))
        ).limit
        == "compute"
    )


def test_waiting_rank_is_not_a_slow_network():
    run = trained(RANKS)
    late_s = 0.5 * run.steps[0].step_s
    bottleneck = bottleneck_in(
        run,
        step_s=lambda row: row.step_s + late_s,
        longest_data_wait_s=lambda row: row.data_wait_s + late_s,
        communication_s=lambda row: (row.communication_s or 0.0) + late_s,
        longest_data_wait_rank=lambda _: 2,
    )
    assert (bottleneck.limit, bottleneck.part("data loading").share) == (
        "data loading",
        pytest.approx(1 / 3, abs=0.03),
    )
    assert bottleneck.part("network").share < 0.02


def test_counts_wait_of_all_ranks_once():
    # And a wait of all ranks counts once.
    run = trained(replace(RANKS, load_s_per_row=2e-3))
    assert bottleneck_in(
        run, longest_data_wait_s=lambda row: row.data_wait_s
    ) == bottleneck_in(run)


@pytest.mark.parametrize(("workers", "limit"), [(2, "data loading"), (0, "network")])
def test_prefetching_loader_sets_the_pace(workers, limit):
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
    assert bottleneck_in(run, **changed).limit == limit


def test_says_what_cannot_be_separated():
    bottleneck = bottleneck_in(
        trained(World(nodes=2, node_bytes_per_s=1e11)), communication_s=lambda _: None
    )
    assert any("gradient" in words for words in bottleneck.untold)


def test_counters_separate_launches_from_compute():
    bottleneck = bottleneck_in(
        trained(GPU),
        Counters(busy_share=0.5, tensor_share=0.2, memory_share=0.2, source="counters"),
    )
    assert bottleneck.limit == "launch-bound"
    assert not any("launches" in words for words in bottleneck.untold)


def test_profile_without_sweep_has_no_bottleneck():
    assert (
        bottleneck_of_profile(but(example_profile(), evidence={"workers": None}))
        is None
    )


def test_measures_mfu_in_counted_windows():
    profile = profile_of(GPU, settings(GPU))
    assert bottleneck_of_profile(profile).mfu is None
    flops = [0.38 * 835e12, 0.42 * 835e12]
    rows = [
        row.model_copy(update={"model_flops_per_s_per_rank": flops})
        for row in profile.evidence.workers.rows
    ]
    workers = profile.evidence.workers.model_copy(update={"rows": rows})
    bottleneck = bottleneck_of_profile(but(profile, evidence={"workers": workers}))
    # Two windows show no spread.
    assert (bottleneck.mfu.value, bottleneck.mfu.low) == (pytest.approx(0.4), None)
    assert bottleneck_sentence(None) == "Bottleneck: not measured"
    assert bottleneck_sentence(replace(bottleneck, decided=False)).startswith(
        "Bottleneck (not certain): GPU"
    )


def step_rows(**changes: object) -> list[StepRow]:
    return [
        row.model_copy(update=changes)
        for row in trained(World(ranks_per_node=2, slow_rank=1.5), steps=12).steps
    ]


def share(steps: list[StepRow], cause: str) -> float:
    return next(
        part.share for part in parts_of_steps(steps, "x", 1.0) if part.cause == cause
    )


@pytest.mark.parametrize(
    ("changes", "untold", "cause"),
    [
        ({}, ("slowest_rank", "slowest_rank_ratio"), "straggler"),
        (
            {"longest_data_wait_s": 0.2 * step_rows()[0].step_s},
            ("longest_data_wait_s",),
            "data loading",
        ),
    ],
    ids=["slowest rank", "longest wait"],
)
def test_fills_unknown_ranks_from_known_steps(changes, untold, cause):
    known = step_rows(**changes)
    early = [row.model_copy(update=dict.fromkeys(untold)) for row in known[:6]]
    assert share(early + known[6:], cause) == pytest.approx(
        share(known, cause), rel=0.05
    )


def test_other_slow_rank_each_step_is_uneven():
    assert uneven_share(step_rows()) == 0
    turns = [
        row.model_copy(update={"slowest_rank": number % 2})
        for number, row in enumerate(step_rows())
    ]
    assert uneven_share(turns) > 0.1
    # Steps of different widths are not alike, so their slow ranks say nothing.
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
    ids=["waits at once", "slower by chance"],
)
def test_data_share_is_lost_to_waiting(waits, ratio, expected):
    row = example_profile().evidence.workers.rows[0]
    share = data_share(
        row.model_copy(update={"data_wait_share": waits, "ratio_to_cached": ratio})
    )
    assert share == pytest.approx(expected)


shares = st.floats(0, 0.3)


def shares_with(
    counters: dict[str, float], uneven: float = 0.0, **known: float
) -> dict[str, float]:
    """Return the shares by cause, from parts and counters."""
    parts = [StepPart(cause=cause, share=share) for cause, share in known.items()]  # type: ignore[arg-type]
    return {
        part.cause: part.share
        for part in with_counters(parts, Counters(**counters, source="x"), uneven)[0]
    }


def test_waits_do_not_count_as_launches():
    counters = {"busy_share": 0.54, "tensor_share": 0.4, "memory_share": 0.2}
    assert shares_with(counters, straggler=0.4)["launch-bound"] == pytest.approx(
        0, abs=1e-9
    )
    assert shares_with(counters, straggler=0.0)["launch-bound"] == pytest.approx(0.4)


def test_waiting_for_slow_rank_counts_as_launches():
    # Ranks that wait for another one every time wait for programs.
    shares = shares_with({"busy_share": 0.6}, 0.3, straggler=0.3, network=0.1)
    assert (shares["straggler"], shares["network"]) == (0, pytest.approx(0.1))
    assert shares["launch-bound"] >= 0.3


def test_optimizer_traffic_does_not_count_as_memory():
    counters = {"busy_share": 0.95, "tensor_share": 0.35, "memory_share": 0.52}
    assert shares_with(counters, **{"optimizer step": 0.5})["memory"] < 0.05
    assert shares_with(counters, update=0.0)["memory"] > 0.4


@given(shares, shares, shares, *[st.floats(0, 1)] * 4)
def test_parts_stay_within_the_step(
    waits, updates, padding, busy, tensor, memory, more_memory
):
    counters = {"busy_share": busy, "tensor_share": tensor, "memory_share": memory}
    shares_by_cause = shares_with(
        counters, network=waits, update=updates, padding=padding * (1 - waits - updates)
    )
    assert all(share >= 0 for share in shares_by_cause.values())
    assert sum(shares_by_cause.values()) <= 1 + 1e-9
    fixed = {"busy_share": 0.9, "tensor_share": 0.4}
    less, more = (
        shares_with(fixed | {"memory_share": memory_share})["memory"]
        for memory_share in sorted((memory, more_memory))
    )
    assert less <= more
