import itertools
import math
import random

import pytest

from autotune.errors import Undecided
from autotune.search.decide import knob_space
from autotune.search.measure import (
    FINALISTS,
    FIRST_VERIFYING,
    MOST_VERIFYING,
    TOGETHER,
    confirm,
    evidence,
)
from autotune.trials.values import Crashed, OutOfMemory
from testbed.simulators.explorations import (
    CELLS,
    FEW,
    GLOBAL_ROWS,
    UNEXPLORED,
    additive,
    exploring,
    knobs_of,
    worth,
)

NO_LIMIT = {"max": None}
BROKEN = Crashed(detail="broken")


def explored(place, rate, instead=lambda *_: None, **changes):
    search = exploring(place, rate, instead, **changes)
    search.run()
    return search, confirm(search)


def fails(concerned, outcome=BROKEN):
    return lambda *given: outcome if concerned(*given) else None


def checks_of(search):
    return [
        trial.measured["config"]
        for trial in search.runner.machine.trials
        if trial.measured.get("losses")
    ]


def taken(search, found):
    return found.candidate if found.adopted else search.starting


def only_in_bf16(knobs):
    """Compiling wins where products are bf16, and costs elsewhere; packing matters as
    well."""
    together = {
        (True, "bf16"): 1.8,
        (True, "fp32"): 0.8,
        (False, "bf16"): 1.1,
        (False, "fp32"): 1.0,
    }
    layout = {"packed": 1.0, "bucketed": 0.8, "padded": 0.5}[knobs.layout]
    return (
        1000
        * layout
        * together[knobs.compile, knobs.precision]
        * min(1.0, knobs.micro_batch_size / 16)
    )


def small_is_fast(knobs):
    """Caches hold a few rows, more of them with checkpointing; beyond that each
    doubling costs."""
    holds = 16 if knobs.activation_checkpointing == "full" else 4
    over = 0.85 ** max(0.0, math.log2(knobs.micro_batch_size / holds))
    kind = 0.7 if knobs.activation_checkpointing == "full" else 1.0
    return 1000 * over * kind * knobs.micro_batch_size / (knobs.micro_batch_size + 2)


NOTHING_WINS = additive(
    {
        "bf16": 0.7,
        "selective": 0.9,
        "full": 0.8,
        "padded": 0.5,
        "bucketed": 0.9,
        True: 0.8,
    }
)
LANDSCAPES = {
    "compiled": additive(
        {
            True: 1.6,
            "bf16": 1.2,
            "selective": 0.85,
            "full": 0.7,
            "padded": 0.4,
            "bucketed": 0.8,
        }
    ),
    "padded in bf16": additive(
        {True: 0.7, "bf16": 1.5, "full": 0.7, "selective": 0.9, "padded": 1.3}
    ),
    "large micro-batches alone": additive(
        {"bf16": 0.9, "full": 0.7, "selective": 0.8, "padded": 0.5, True: 0.9}
    ),
    "pairs that do not add up": only_in_bf16,
    "small micro-batches": small_is_fast,
}


@pytest.mark.parametrize(("name", "seed"), list(itertools.product(LANDSCAPES, (0, 1))))
def test_what_it_takes_has_97_per_cent_of_the_best_after_a_third_of_the_cells(
    tmp_path, name, seed
):
    rate = LANDSCAPES[name]
    search, found = explored(tmp_path, rate, seed=seed, cells=CELLS)
    assert worth(rate, taken(search, found)) >= 0.97 * max(
        worth(rate, cell) for cell in CELLS
    )
    assert len(search.known.tried) - 1 <= 0.35 * len(CELLS)


@pytest.mark.parametrize(
    ("noise", "seed"), list(itertools.product((0.01, 0.05), (0, 1)))
)
def test_where_nothing_is_faster_the_unexplored_settings_stay_or_what_is_as_fast(
    tmp_path, noise, seed
):
    best = UNEXPLORED.but(micro_batch_size=32)
    cells = (best, *(cell for cell in FEW if cell != best))
    search, found = explored(
        tmp_path, NOTHING_WINS, noise=noise, seed=seed, cells=cells, most_trials=16
    )
    assert worth(NOTHING_WINS, taken(search, found)) >= 0.995 * worth(
        NOTHING_WINS, best
    )


def test_what_is_taken_is_proven_with_windows_of_both_in_turn_once_nothing_can_be_seen_any_more(
    tmp_path,
):
    search, found = explored(tmp_path, LANDSCAPES["padded in bf16"])
    assert search.stopped_because.startswith("the largest expected improvement, 0.")
    assert len(search.known.tried) < len(FEW)
    assert found.adopted
    assert 1 < found.ratio.low < found.ratio.value < found.ratio.high
    cells = [
        knobs_of(one.trial)
        for one in search.runner.finished
        if not one.trial.measured.get("losses")
    ]
    first, second = cells[-8:-6]
    assert {first, second} == {found.candidate, UNEXPLORED}
    assert cells[-8:] == [first, second, second, first] * 2


CLOSE = additive({"bf16": 1.3, "padded": 1.02, "full": 0.98})
"""Layouts and recomputing matter less than the noise."""


def test_finalists_are_held_against_each_other_and_drop_out_for_good(tmp_path):
    several = 0
    for seed in range(4):
        proofs = {}

        def note(search, trial, proofs=proofs):
            if search.stopped_because and not trial.measured.get("losses"):
                proofs.setdefault(trial.measured["round"], []).append(knobs_of(trial))

        search, found = explored(
            tmp_path / str(seed), CLOSE, note, noise=0.1, seed=seed
        )
        rounds = list(proofs.values())
        assert all(
            len(set(cells)) == len(cells) <= 1 + FINALISTS and UNEXPLORED in cells
            for cells in rounds
        )
        assert all(
            set(later) <= set(earlier) for earlier, later in itertools.pairwise(rounds)
        )
        assert all(found.candidate in cells for cells in rounds)
        assert FIRST_VERIFYING <= len(rounds) <= MOST_VERIFYING
        assert len(search.known.tried[found.candidate].full) >= len(rounds)
        several += len(rounds[0]) > len(rounds[-1])
    assert several >= 2


def test_a_finalist_that_crashes_leaves_the_others_in_the_race(tmp_path):
    crashed = set()

    def crash(search, trial):
        if (
            search.stopped_because
            and knobs_of(trial) != UNEXPLORED
            and crashed <= {knobs_of(trial)}
        ):
            crashed.add(knobs_of(trial))
            return BROKEN
        return None

    search, found = explored(tmp_path, CLOSE, crash, noise=0.06, seed=2)
    assert len(crashed) == 1
    assert found.adopted
    assert found.candidate not in crashed
    assert search.known.tried[crashed.pop()].outcome == "crashed"


def test_every_window_is_beside_one_of_the_unexplored_settings_and_a_hopeless_first_look_is_all_a_cell_gets(
    tmp_path,
):
    search, found = explored(tmp_path, LANDSCAPES["compiled"], cells=CELLS)
    for trial in search.runner.machine.trials:
        config = trial.measured["config"]
        assert trial.measured["cached"]
        assert config["global_batch_size"] == GLOBAL_ROWS[config["layout"]]
        assert config["global_batch_tokens"] is None
        assert (
            trial.measured.get("losses")
            or UNEXPLORED.name in trial.measured["interleaved_with"]
        )
    pruned = {
        cell: one for cell, one in search.known.tried.items() if one.outcome == "pruned"
    }
    assert len(pruned) > 3
    assert {(len(one.short), len(one.full)) for one in pruned.values()} == {(1, 0)}
    of_pruned = [
        trial.measured
        for trial in search.runner.machine.trials
        if knobs_of(trial) in pruned
    ]
    assert {(one["min_steps"], one["window_s"]) for one in of_pruned} == {(1, 0.5)}
    assert evidence(search, found).pruned == len(pruned)


def test_out_of_memory_rules_out_larger_ones_of_the_kind_and_no_other(tmp_path):
    def too_large(knobs):
        return knobs.activation_checkpointing == "none" and knobs.micro_batch_size > 16

    rate = additive({"full": 0.9, "padded": 0.8, "bf16": 0.9})
    search, found = explored(
        tmp_path, rate, failing=fails(too_large, OutOfMemory(detail="refused"))
    )
    refused = {}
    for cell in map(knobs_of, search.runner.machine.trials):
        kind = (cell.precision, cell.activation_checkpointing, cell.layout)
        assert cell.micro_batch_size < refused.get(kind, 1000)
        if too_large(cell):
            refused[kind] = cell.micro_batch_size
    assert refused
    assert {
        one.outcome for cell, one in search.known.tried.items() if too_large(cell)
    } == {"out of memory"}
    assert worth(rate, taken(search, found)) >= 0.97 * max(
        worth(rate, cell) for cell in FEW if not too_large(cell)
    )


def test_what_is_predicted_not_to_fit_is_never_run_and_asked_only_once_it_is_proposed(
    tmp_path,
):
    asked = []
    search, _ = explored(
        tmp_path, additive({}), predict=lambda kind: asked.append(kind) or {"max": 8}
    )
    assert {
        knobs_of(trial).micro_batch_size for trial in search.runner.machine.trials
    } <= {1, 2, 4, 8}
    assert len(asked) == len(set(asked)) <= len({cell.kind for cell in FEW})
    assert {kind.micro_batch_size for kind in asked} == {1}
    again = explored(
        tmp_path,
        additive({}),
        predict=lambda kind: pytest.fail("it is in the trial log"),
    )[0]
    assert (again.predicted, again.predicting_s) == (
        search.predicted,
        search.predicting_s,
    )
    assert again.runner.machine.trials == []


def trials_until_found(place, rate, predicted, seed):
    def predict(kind):
        assert kind not in asked
        steps = {
            one.micro_batch_size: 1 / predicted[one]
            for one in FEW
            if one.kind == kind and one in predicted
        }
        return asked.setdefault(kind, NO_LIMIT | {"step_s": steps})

    asked, best = {}, max(worth(rate, cell) for cell in FEW)
    search = exploring(
        place, rate, noise=0.02, seed=seed, minutes=120, most_trials=12, predict=predict
    )
    search.run()
    tried = [worth(rate, cell) >= 0.97 * best for cell in search.known.tried]
    return tried.index(True) if True in tried else len(FEW), search


def test_with_predicted_speeds_fewer_trials_find_the_best_and_wrong_ones_cost_a_round(
    tmp_path,
):
    found = {"none": 0, "near": 0, "wrong": 0}
    for name, seed in itertools.product(
        ("padded in bf16", "large micro-batches alone"), range(2)
    ):
        rate, rng = LANDSCAPES[name], random.Random(seed)
        near = {cell: worth(rate, cell) * math.exp(rng.gauss(0, 0.1)) for cell in FEW}
        wrong = dict(zip(FEW, rng.sample(list(near.values()), len(FEW)), strict=True))
        for kind, predicted in {"none": {}, "wrong": wrong, "near": near}.items():
            trials, search = trials_until_found(
                tmp_path / f"{kind} {name} {seed}", rate, predicted, seed
            )
            found[kind] += trials
    for row in evidence(search, confirm(search)).rows[1:]:
        assert row.predicted_ratio == pytest.approx(
            near[row.settings] / near[UNEXPLORED]
        )
    assert found["near"] < 0.6 * found["none"], found
    assert found["wrong"] <= found["none"] + 4 * TOGETHER, found


def test_a_value_that_only_crashes_is_left_out_and_blames_no_other(tmp_path):
    rate = LANDSCAPES["padded in bf16"]
    search, found = explored(
        tmp_path, rate, failing=fails(lambda knobs: knobs.compile), cells=CELLS
    )
    assert (
        2
        <= len(
            [
                cell
                for cell, one in search.known.tried.items()
                if one.outcome == "crashed"
            ]
        )
        <= 6
    )
    assert not any(cell.compile for cell in search.known.cells)
    told = evidence(search, found).left_out
    assert told[0] == "attention: varlen requires a GPU"
    assert "compile true: 2 configurations failed, and none completed" in told
    assert worth(rate, taken(search, found)) >= 0.97 * max(
        worth(rate, cell) for cell in CELLS if not cell.compile
    )


def test_two_values_that_crash_only_together_keep_each_other_alive_and_the_same_precision_needs_no_check(
    tmp_path,
):
    failing = fails(
        lambda knobs: knobs.precision == "bf16" and knobs.layout == "padded"
    )
    search, found = explored(
        tmp_path, additive({"bf16": 1.5, "full": 0.8}), failing=failing
    )
    assert (taken(search, found).precision, taken(search, found).layout) == (
        "bf16",
        "packed",
    )
    search, found = explored(tmp_path / "rows", LANDSCAPES["large micro-batches alone"])
    best = search.known.tried[found.candidate]
    assert (best.outcome, found.adopted, found.equal_loss, checks_of(search)) == (
        "ran",
        True,
        None,
        [],
    )
    assert len(best.full) >= 4  # what may be the best is not pruned


@pytest.mark.parametrize("outcome", [BROKEN, OutOfMemory(detail="refused")])
def test_without_the_unexplored_settings_nothing_can_be_decided(tmp_path, outcome):
    with pytest.raises(Undecided, match="the starting configuration could not") as told:
        explored(
            tmp_path,
            additive({}),
            failing=fails(lambda knobs: knobs == UNEXPLORED, outcome),
        )
    assert outcome.detail in told.value.message
    assert f"resumes from {tmp_path}" in told.value.next_step


def test_a_candidate_that_crashes_when_it_is_to_be_proven_is_not_taken(tmp_path):
    crash = fails(
        lambda search, trial: search.stopped_because and knobs_of(trial) != UNEXPLORED
    )
    search, found = explored(tmp_path, LANDSCAPES["padded in bf16"], crash)
    assert (found.adopted, found.ratio.value, found.ratio.low) == (False, 1.0, None)
    assert "failed (crashed)" in evidence(search, found).choice


def test_it_stops_after_as_many_cells_as_are_allowed_or_half_of_its_time_and_proves_in_the_other(
    tmp_path,
):
    search, _ = explored(tmp_path, additive({}), most_trials=6)
    assert 6 <= len(search.known.tried) - 1 <= 8  # a round is not cut
    assert search.stopped_because.endswith("configurations was reached")
    uncompiled = tuple(cell for cell in CELLS if not cell.compile)
    search, found = explored(
        tmp_path / "half", additive({}), noise=0.03, cells=uncompiled, minutes=3, seed=1
    )
    assert (
        search.stopped_because
        == "half of the time budget was used; the other half is for verification"
    )
    assert 90 <= search.reading.seconds <= 180 + 4 * 7
    assert found.adopted


@pytest.mark.parametrize("seed", range(3))
def test_predictions_take_of_the_same_time_and_only_as_many_are_verified_as_the_rest_of_it_allows(
    tmp_path, seed
):
    verified = {}

    def note(search, trial):
        if search.stopped_because and not trial.measured.get("losses"):
            verified.setdefault(trial.measured["round"], set()).add(knobs_of(trial))

    changes = {
        "noise": 0.1,
        "seed": seed,
        "minutes": 2,
        "predict": lambda _: search.runner.clock.sleep(5) or NO_LIMIT,
    }
    search = exploring(tmp_path, CLOSE, note, **changes)
    search.run()
    confirm(search)
    assert search.predicting_s == pytest.approx(5 * len(search.predicted), abs=0.01)
    assert 2 <= len(next(iter(verified.values()))) <= 1 + 3 < 1 + FINALISTS
    assert len(verified) >= FIRST_VERIFYING
    assert search.left_s >= -15  # the windows in progress, and two of a loss check


COMPILED = (UNEXPLORED, *(cell for cell in CELLS if cell.compile))


@pytest.mark.parametrize(
    ("changes", "why", "cells"),
    [
        ({"cells": (UNEXPLORED,)}, "no other configuration fits or runs", 1),
        (
            {"cells": FEW, "predict": lambda kind: {"max": 0}},
            "no other configuration fits or runs",
            1,
        ),
        (
            {"cells": COMPILED, "minutes": 1},
            "no remaining configuration fits the time left",
            len(COMPILED),
        ),
    ],
)
def test_where_nothing_else_fits_or_the_time_allows_nothing_no_window_is_read(
    tmp_path, changes, why, cells
):
    search, found = explored(tmp_path, additive({}), **changes)
    assert (search.stopped_because, search.runner.machine.trials) == (why, [])
    assert (found.candidate, found.adopted, evidence(search, found).configurations) == (
        UNEXPLORED,
        False,
        cells,
    )


@pytest.mark.parametrize("windows", [1, 9, 30])
def test_ended_at_any_window_it_goes_on_and_repeats_at_most_the_round_it_was_in(
    tmp_path, windows
):
    rate = LANDSCAPES["padded in bf16"]
    undisturbed = evidence(*explored(tmp_path / "undisturbed", rate))
    before = []

    def interrupt(search, trial):
        before.append(trial)
        if len(before) > windows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explored(tmp_path / "ended", rate, interrupt)
    done = {trial.key for trial in before[:windows]}
    search, found = explored(tmp_path / "ended", rate)
    repeated = [trial for trial in search.runner.machine.trials if trial.key in done]
    assert {trial.measured["round"] for trial in repeated} <= {
        before[windows].measured["round"]
    }
    assert evidence(search, found) == undisturbed


def test_what_crashed_has_another_chance_alone_and_once_it_runs_is_read_beside_the_others_of_its_round(
    tmp_path,
):
    rate, failing = (
        LANDSCAPES["padded in bf16"],
        fails(lambda knobs: knobs.layout == "padded"),
    )
    first = evidence(*explored(tmp_path, rate, failing=failing))
    search, found = explored(tmp_path, rate, failing=failing)
    assert {knobs_of(trial).layout for trial in search.runner.machine.trials} == {
        "padded"
    }
    assert evidence(search, found).choice == first.choice
    search, found = explored(tmp_path, rate)
    first = [one for one in search.runner.finished if one.trial.measured["round"] == 0]
    names = set(first[0].trial.measured["interleaved_with"])
    assert len({one.trial.key for one in first if not one.from_trial_log}) == len(names)
    assert taken(search, found).layout == "padded"


BF16_WINS = additive({"bf16": 1.5, "padded": 0.6, "full": 0.7})


def bf16_learns_less(precision, step):
    return 3.0 - (0.01 if precision == "fp32" else 0.008) * step


def bf16_alone_wins(knobs):
    other = (
        1.0
        if knobs.layout == "packed" and knobs.activation_checkpointing == "none"
        else 0.7
    )
    rows = 1.0 if knobs.micro_batch_size == UNEXPLORED.micro_batch_size else 0.8
    return 1000 * other * rows * (1.5 if knobs.precision == "bf16" else 1.0)


def test_another_precision_is_taken_where_it_learns_the_same_and_the_evidence_counts_what_was_done(
    tmp_path,
):
    search, found = explored(tmp_path, BF16_WINS)
    assert (found.adopted, found.candidate.precision) == (True, "bf16")
    assert "0.00% apart, within 1%" in found.equal_loss
    fp32, bf16 = checks_of(search)
    assert (fp32["precision"], bf16["precision"]) == ("fp32", "bf16")
    assert fp32 | {"precision": "bf16"} == bf16
    assert fp32["micro_batch_size"] == UNEXPLORED.micro_batch_size
    kept = evidence(search, found)
    assert kept.configurations == len(FEW)
    assert kept.trials == len(search.known.tried) - 1 == len(kept.rows) - 1
    assert kept.windows == len(search.runner.finished)
    # Those of the loss are of no row.
    assert sum(row.windows for row in kept.rows) == kept.windows - 2
    assert kept.seconds == pytest.approx(search.runner.seconds, abs=0.001)
    assert (kept.ratio_low, kept.ratio_high) == (found.ratio.low, found.ratio.high)
    assert kept.chosen == kept.candidate != kept.starting
    own = next(row for row in kept.rows if row.settings == kept.starting)
    assert own.ratio_to_starting is None
    assert (
        own.windows
        == sum(knobs_of(one.trial) == UNEXPLORED for one in search.runner.finished) - 1
    )


FLOAT8 = {"compile": (False, True), "float8": ("none", "rowwise")}


@pytest.mark.parametrize(
    ("knob", "levels", "checks", "said"),
    [
        (
            "float8",
            FLOAT8,
            [("none", False), ("rowwise", True)],
            "with bf16, rowwise float8 and",
        ),
        (
            "attention",
            {"attention": ("auto", "fa3")},
            [("auto", False), ("fa3", False)],
            "",
        ),
    ],
)
@pytest.mark.parametrize("learns", [1.0, 0.5])
def test_float8_and_flash_attention_3_are_tried_only_in_bf16_and_taken_only_if_they_learn_the_same(
    tmp_path, knob, levels, checks, said, learns
):
    (usual, _), (value, compiled) = checks
    cells = knob_space(
        UNEXPLORED,
        {"precision": ("fp32", "bf16")} | levels,
        GLOBAL_ROWS,
        1,
        lambda knobs: 8,
    )
    assert {
        (one.precision, one.compile) for one in cells if getattr(one, knob) == value
    } == {("bf16", compiled)}

    def loss(name, step):
        return 3.0 - 0.01 * step * (learns if value in name else 1.0)

    search, found = explored(
        tmp_path, additive({value: 2.0, "bf16": 1.2}), cells=cells, loss=loss
    )
    chosen = value if learns == 1.0 else usual
    assert (
        found.adopted,
        getattr(found.candidate, knob),
        found.candidate.precision,
    ) == (True, chosen, "bf16")
    assert said in found.equal_loss
    assert [(one[knob], one["compile"]) for one in checks_of(search)][:2] == checks


@pytest.mark.parametrize(
    ("changes", "said", "checks"),
    [
        ({"loss": bf16_learns_less}, "not within 1%", 2),
        ({"loss": lambda *_: 3.0}, "not checked: with fp32 the loss went", 1),
        (
            {"instead": fails(lambda _, one: one.measured.get("losses"))},
            "the run with fp32 failed (crashed)",
            1,
        ),
    ],
)
def test_another_precision_that_learns_less_or_nothing_known_is_not_taken_however_fast(
    tmp_path, changes, said, checks
):
    search, found = explored(tmp_path, bf16_alone_wins, **changes)
    assert found.ratio.low > 1
    assert said in found.equal_loss
    assert len(checks_of(search)) == checks
    kept = evidence(search, found)
    assert (kept.adopted, kept.chosen) == (False, kept.starting)
    assert f"is faster, but was rejected: {found.equal_loss}" in kept.choice


def test_where_another_precision_learns_less_the_fastest_of_the_same_is_taken(tmp_path):
    search, found = explored(tmp_path, BF16_WINS, loss=bf16_learns_less)
    assert (found.adopted, found.candidate.precision) == (True, "fp32")
    best = max(worth(BF16_WINS, cell) for cell in FEW if cell.precision == "fp32")
    assert worth(BF16_WINS, found.candidate) >= 0.97 * best
    told = evidence(search, found).choice
    assert f"verified to be faster than {UNEXPLORED.name}; " in told
    assert f"bf16 was rejected: {found.equal_loss}" in told
