import itertools
import math
import random

import pytest

from autotune.errors import Undecided
from autotune.search.configuration import Configuration
from autotune.search.decide.configuration_space import (
    configuration_space,
    without_size,
)
from autotune.search.explore_evidence import explore_evidence as evidence
from autotune.search.measure import TOGETHER
from autotune.search.request import StepPrediction
from autotune.search.verification import (
    FEWEST_ROUNDS,
    FINALISTS,
    MOST_ROUNDS,
    confirm,
    finalists,
)
from autotune.trials.outcomes import Crashed, OutOfMemory
from testbed.simulators.explorations import (
    CONFIGURATIONS,
    FEW,
    GLOBAL_BATCH_SIZES,
    LEVELS,
    SETTINGS,
    STARTING,
    additive,
    configuration_of,
    exploring,
    is_starting,
    settings_of,
    worth,
)

NO_LIMIT = StepPrediction(largest_size=None)
BROKEN = Crashed(detail="broken")


def explored(directory, rate, instead=lambda *_: None, **changes):
    search = exploring(directory, rate, instead, **changes)
    search.run()
    return search, confirm(search)


def fails(concerned, outcome=BROKEN):
    return lambda *given: outcome if concerned(*given) else None


def checks_of(search):
    return [
        trial.config
        for trial in search.runner.machine.trials
        if trial.step_arguments.get("losses")
    ]


def taken(search, confirmed):
    return confirmed.candidate if confirmed.adopted else search.starting


def only_in_bf16(choice):
    """Return a rate at which compiling wins with bf16 matmuls only; packing matters."""
    together = {
        (True, "bf16"): 1.8,
        (True, "fp32"): 0.8,
        (False, "bf16"): 1.1,
        (False, "fp32"): 1.0,
    }
    layout = {"packed": 1.0, "bucketed": 0.8, "padded": 0.5}[choice["layout"]]
    return (
        1000
        * layout
        * together[choice["compile"], choice["precision"]]
        * min(1.0, choice["micro_batch_size"] / 16)
    )


def small_is_fast(choice):
    """Return a rate that falls with each doubling beyond what the caches hold.

    With checkpointing they hold more sequences.
    """
    holds = 16 if choice["activation_checkpointing"] == "full" else 4
    over = 0.85 ** max(0.0, math.log2(choice["micro_batch_size"] / holds))
    kind = 0.7 if choice["activation_checkpointing"] == "full" else 1.0
    return (
        1000
        * over
        * kind
        * choice["micro_batch_size"]
        / (choice["micro_batch_size"] + 2)
    )


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
def test_finds_nearly_the_best_configuration(tmp_path, name, seed):
    rate = LANDSCAPES[name]
    search, confirmed = explored(
        tmp_path, rate, seed=seed, configurations=CONFIGURATIONS
    )
    assert worth(rate, taken(search, confirmed)) >= 0.97 * max(
        worth(rate, cell) for cell in CONFIGURATIONS
    )
    assert len(search.state.tried) - 1 <= 0.35 * len(CONFIGURATIONS)


@pytest.mark.parametrize(
    ("noise", "seed"), list(itertools.product((0.01, 0.05), (0, 1)))
)
def test_keeps_starting_configuration_if_nothing_is_faster(tmp_path, noise, seed):
    best = STARTING.but({"micro_batch_size": 32})
    cells = (best, *(cell for cell in FEW if cell != best))
    search, confirmed = explored(
        tmp_path,
        NOTHING_WINS,
        noise=noise,
        seed=seed,
        configurations=cells,
        most_trials=16,
    )
    assert worth(NOTHING_WINS, taken(search, confirmed)) >= 0.995 * worth(
        NOTHING_WINS, best
    )


def test_verifies_with_interleaved_windows(tmp_path):
    search, confirmed = explored(tmp_path, LANDSCAPES["padded in bf16"])
    assert search.stopped_because.startswith("the largest expected improvement, 0.")
    assert len(search.state.tried) < len(FEW)
    assert confirmed.adopted
    assert 1 < confirmed.ratio.low < confirmed.ratio.value < confirmed.ratio.high
    cells = [
        configuration_of(finished.trial)
        for finished in search.runner.finished
        if not finished.trial.step_arguments.get("losses")
    ]
    first, second = cells[-8:-6]
    assert {first, second} == {confirmed.candidate, STARTING}
    assert cells[-8:] == [first, second, second, first] * 2


CLOSE = additive({"bf16": 1.3, "padded": 1.02, "full": 0.98})
"""Layouts and activation checkpointing matter less than the noise."""


def test_finalists_drop_out_for_good(tmp_path):
    several = 0
    for seed in range(4):
        proofs = {}

        def note(search, trial, proofs=proofs):
            if search.stopped_because and not trial.step_arguments.get("losses"):
                proofs.setdefault(trial.measured["round"], []).append(
                    configuration_of(trial)
                )

        search, confirmed = explored(
            tmp_path / str(seed), CLOSE, note, noise=0.1, seed=seed
        )
        rounds = list(proofs.values())
        assert all(
            len(set(cells)) == len(cells) <= 1 + FINALISTS and STARTING in cells
            for cells in rounds
        )
        assert all(
            set(later) <= set(earlier) for earlier, later in itertools.pairwise(rounds)
        )
        assert all(confirmed.candidate in cells for cells in rounds)
        assert FEWEST_ROUNDS <= len(rounds) <= MOST_ROUNDS
        assert len(search.state.tried[confirmed.candidate].full) >= len(rounds)
        several += len(rounds[0]) > len(rounds[-1])
    assert several >= 2


def test_crashed_finalist_leaves_the_others(tmp_path):
    crashed = set()

    def crash(search, trial):
        if (
            search.stopped_because
            and configuration_of(trial) != STARTING
            and crashed <= {configuration_of(trial)}
        ):
            crashed.add(configuration_of(trial))
            return BROKEN
        return None

    for seed in range(8):
        search = exploring(tmp_path / str(seed), CLOSE, crash, noise=0.1, seed=seed)
        search.run()
        if len(finalists(search)) > 2:
            break
    confirmed = confirm(search)
    assert len(crashed) == 1
    assert confirmed.adopted
    assert confirmed.candidate not in crashed
    assert search.state.tried[crashed.pop()].outcome == "crashed"


def test_every_window_has_a_starting_one_beside(tmp_path):
    search, confirmed = explored(
        tmp_path, LANDSCAPES["compiled"], configurations=CONFIGURATIONS
    )
    for trial in search.runner.machine.trials:
        config = trial.config
        assert trial.measured["cached"]
        assert config["global_batch_size"] == GLOBAL_BATCH_SIZES[config["layout"]]
        assert config["global_batch_tokens"] is None
        assert (
            trial.step_arguments.get("losses")
            or SETTINGS.words(STARTING) in trial.measured["interleaved_with"]
        )
    pruned = {
        cell: result
        for cell, result in search.state.tried.items()
        if result.outcome == "pruned"
    }
    assert len(pruned) > 3
    assert {(len(result.short), len(result.full)) for result in pruned.values()} == {
        (1, 0)
    }
    of_pruned = [
        trial.measured
        for trial in search.runner.machine.trials
        if configuration_of(trial) in pruned
    ]
    assert {
        (measured["min_steps"], measured["window_s"]) for measured in of_pruned
    } == {(1, 0.5)}
    assert evidence(search, confirmed).pruned == len(pruned)


def test_out_of_memory_rules_out_larger_sizes(tmp_path):
    def too_large(choice):
        return (
            choice["activation_checkpointing"] == "none"
            and choice["micro_batch_size"] > 16
        )

    rate = additive({"full": 0.9, "padded": 0.8, "bf16": 0.9})
    search, confirmed = explored(
        tmp_path, rate, failing=fails(too_large, OutOfMemory(detail="refused"))
    )
    refused = {}
    for cell in map(configuration_of, search.runner.machine.trials):
        kind = (cell["precision"], cell["activation_checkpointing"], cell["layout"])
        assert cell["micro_batch_size"] < refused.get(kind, 1000)
        if too_large(cell):
            refused[kind] = cell["micro_batch_size"]
    assert refused
    assert {
        result.outcome for cell, result in search.state.tried.items() if too_large(cell)
    } == {"out of memory"}
    assert worth(rate, taken(search, confirmed)) >= 0.97 * max(
        worth(rate, cell) for cell in FEW if not too_large(cell)
    )


def test_skips_what_is_predicted_not_to_fit(tmp_path):
    asked_kinds = []
    search, _ = explored(
        tmp_path,
        additive({}),
        predict=lambda kind: asked_kinds.append(kind) or StepPrediction(largest_size=8),
    )
    assert {
        configuration_of(trial)["micro_batch_size"]
        for trial in search.runner.machine.trials
    } <= {1, 2, 4, 8}
    assert (
        len(asked_kinds)
        == len(set(asked_kinds))
        <= len({without_size(SETTINGS, cell) for cell in FEW})
    )
    assert {kind["micro_batch_size"] for kind in asked_kinds} == {1}
    again = explored(
        tmp_path,
        additive({}),
        predict=lambda kind: pytest.fail("it is in the trial log"),
    )[0]
    assert (again.largest_sizes, again.predicting_s) == (
        search.largest_sizes,
        search.predicting_s,
    )
    assert again.runner.machine.trials == []


def trials_until_found(directory, rate, predicted, seed):
    def predict(kind):
        assert kind not in answers
        steps = {
            cell["micro_batch_size"]: 1 / predicted[cell]
            for cell in FEW
            if without_size(SETTINGS, cell) == kind and cell in predicted
        }
        return answers.setdefault(
            kind, StepPrediction(largest_size=None, step_s_by_size=steps)
        )

    answers = {}
    best = max(worth(rate, cell) for cell in FEW)
    search = exploring(
        directory,
        rate,
        noise=0.02,
        seed=seed,
        minutes=120,
        most_trials=12,
        predict=predict,
    )
    search.run()
    tried = [worth(rate, cell) >= 0.97 * best for cell in search.state.tried]
    return tried.index(True) if True in tried else len(FEW), search


def test_predicted_speeds_save_trials(tmp_path):
    trials_by_prediction = {"none": 0, "near": 0, "wrong": 0}
    for name, seed in itertools.product(
        ("padded in bf16", "large micro-batches alone"), range(2)
    ):
        rate = LANDSCAPES[name]
        rng = random.Random(seed)
        near = {cell: worth(rate, cell) * math.exp(rng.gauss(0, 0.1)) for cell in FEW}
        wrong = dict(zip(FEW, rng.sample(list(near.values()), len(FEW)), strict=True))
        for kind, predicted in {"none": {}, "wrong": wrong, "near": near}.items():
            trials, search = trials_until_found(
                tmp_path / f"{kind} {name} {seed}", rate, predicted, seed
            )
            trials_by_prediction[kind] += trials
    for row in evidence(search, confirm(search)).rows[1:]:
        assert row.predicted_ratio == pytest.approx(
            near[Configuration.of(row.settings)] / near[STARTING]
        )
    assert trials_by_prediction["near"] < 0.6 * trials_by_prediction["none"], (
        trials_by_prediction
    )
    assert (
        trials_by_prediction["wrong"] <= trials_by_prediction["none"] + 4 * TOGETHER
    ), trials_by_prediction


def test_crashing_value_is_left_out(tmp_path):
    rate = LANDSCAPES["padded in bf16"]
    search, confirmed = explored(
        tmp_path,
        rate,
        failing=fails(lambda choice: choice["compile"]),
        configurations=CONFIGURATIONS,
    )
    assert (
        2
        <= len(
            [
                cell
                for cell, result in search.state.tried.items()
                if result.outcome == "crashed"
            ]
        )
        <= 6
    )
    assert not any(cell["compile"] for cell in search.state.remaining)
    left_out = evidence(search, confirmed).left_out
    assert left_out[0] == "attention: varlen requires a GPU"
    assert "compile true: 2 configurations failed, and none completed" in left_out
    assert worth(rate, taken(search, confirmed)) >= 0.97 * max(
        worth(rate, cell) for cell in CONFIGURATIONS if not cell["compile"]
    )


def test_values_that_crash_only_together_stay(tmp_path):
    failing = fails(
        lambda choice: choice["precision"] == "bf16" and choice["layout"] == "padded"
    )
    search, confirmed = explored(
        tmp_path, additive({"bf16": 1.5, "full": 0.8}), failing=failing
    )
    assert (
        taken(search, confirmed)["precision"],
        taken(search, confirmed)["layout"],
    ) == (
        "bf16",
        "packed",
    )


def test_same_precision_needs_no_loss_check(tmp_path):
    search, confirmed = explored(
        tmp_path / "rows", LANDSCAPES["large micro-batches alone"]
    )
    best = search.state.tried[confirmed.candidate]
    assert (
        best.outcome,
        confirmed.adopted,
        confirmed.equal_loss,
        checks_of(search),
    ) == (
        "ran",
        True,
        None,
        [],
    )
    assert len(best.full) >= 4  # what may be the best is not pruned


@pytest.mark.parametrize(
    "outcome", [BROKEN, OutOfMemory(detail="refused")], ids=["crashed", "out of memory"]
)
def test_starting_configuration_has_to_run(tmp_path, outcome):
    with pytest.raises(
        Undecided, match="the starting configuration could not"
    ) as caught:
        explored(
            tmp_path,
            additive({}),
            failing=fails(is_starting, outcome),
        )
    assert outcome.detail in caught.value.message
    assert f"resumes from {tmp_path}" in caught.value.next_step


def test_candidate_crashing_in_verification_is_rejected(tmp_path):
    crash = fails(
        lambda search, trial: (
            search.stopped_because and configuration_of(trial) != STARTING
        )
    )
    search, confirmed = explored(tmp_path, LANDSCAPES["padded in bf16"], crash)
    assert (confirmed.adopted, confirmed.ratio.value, confirmed.ratio.low) == (
        False,
        1.0,
        None,
    )
    assert "failed (crashed)" in evidence(search, confirmed).choice


def test_stops_after_enough_cells(tmp_path):
    search, _ = explored(tmp_path, additive({}), most_trials=6)
    assert 6 <= len(search.state.tried) - 1 <= 8  # a round is not cut
    assert search.stopped_because.endswith("configurations was reached")


def test_stops_after_half_of_its_time(tmp_path):
    uncompiled = tuple(cell for cell in CONFIGURATIONS if not cell["compile"])
    search, confirmed = explored(
        tmp_path / "half",
        additive({}),
        noise=0.03,
        configurations=uncompiled,
        minutes=3,
        seed=1,
    )
    assert (
        search.stopped_because
        == "half of the time budget was used; the other half is for verification"
    )
    assert 90 <= search.timer.seconds <= 180 + 4 * 7
    assert confirmed.adopted


@pytest.mark.parametrize("seed", range(3))
def test_verifies_only_what_time_allows(tmp_path, seed):
    verified = {}

    def note(search, trial):
        if search.stopped_because and not trial.step_arguments.get("losses"):
            verified.setdefault(trial.measured["round"], set()).add(
                configuration_of(trial)
            )

    changes = {
        "noise": 0.1,
        "seed": seed,
        "minutes": 2,
        "predict": lambda _: search.runner.clock.sleep(5) or NO_LIMIT,
    }
    search = exploring(tmp_path, CLOSE, note, **changes)
    search.run()
    confirm(search)
    assert search.predicting_s == pytest.approx(5 * len(search.largest_sizes), abs=0.01)
    assert 2 <= len(next(iter(verified.values()))) <= 1 + 3 < 1 + FINALISTS
    assert len(verified) >= FEWEST_ROUNDS
    assert search.left_s >= -15  # the windows in progress, and two of a loss check


COMPILED = (STARTING, *(cell for cell in CONFIGURATIONS if cell["compile"]))


@pytest.mark.parametrize(
    ("changes", "why", "cells"),
    [
        ({"configurations": (STARTING,)}, "no other configuration fits or runs", 1),
        (
            {
                "configurations": FEW,
                "predict": lambda kind: StepPrediction(largest_size=0),
            },
            "no other configuration fits or runs",
            1,
        ),
        (
            {"configurations": COMPILED, "minutes": 1},
            "no remaining configuration fits the time left",
            len(COMPILED),
        ),
    ],
    ids=["alone", "nothing fits", "no time"],
)
def test_reads_no_window_without_time(tmp_path, changes, why, cells):
    search, confirmed = explored(tmp_path, additive({}), **changes)
    assert (search.stopped_because, search.runner.machine.trials) == (why, [])
    assert (
        confirmed.candidate,
        confirmed.adopted,
        evidence(search, confirmed).configurations,
    ) == (
        STARTING,
        False,
        cells,
    )


@pytest.mark.parametrize("windows", [1, 9, 30])
def test_resumes_after_any_window(tmp_path, windows):
    rate = LANDSCAPES["padded in bf16"]
    undisturbed = evidence(*explored(tmp_path / "undisturbed", rate))
    before = []

    def interrupt(search, trial):
        before.append(trial)
        if len(before) > windows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explored(tmp_path / "ended", rate, interrupt)
    finished_keys = {trial.key for trial in before[:windows]}
    search, confirmed = explored(tmp_path / "ended", rate)
    repeated = [
        trial for trial in search.runner.machine.trials if trial.key in finished_keys
    ]
    assert {trial.measured["round"] for trial in repeated} <= {
        before[windows].measured["round"]
    }
    assert evidence(search, confirmed) == undisturbed


def test_crashed_configuration_has_another_chance(tmp_path):
    rate = LANDSCAPES["padded in bf16"]
    failing = fails(lambda choice: choice["layout"] == "padded")
    first = evidence(*explored(tmp_path, rate, failing=failing))
    search, confirmed = explored(tmp_path, rate, failing=failing)
    assert {
        configuration_of(trial)["layout"] for trial in search.runner.machine.trials
    } == {"padded"}
    assert evidence(search, confirmed).choice == first.choice
    search, confirmed = explored(tmp_path, rate)
    first = [
        finished
        for finished in search.runner.finished
        if finished.trial.measured["round"] == 0
    ]
    names = set(first[0].trial.measured["interleaved_with"])
    assert len(
        {finished.trial.key for finished in first if not finished.from_trial_log}
    ) == len(names)
    assert taken(search, confirmed)["layout"] == "padded"


BF16_WINS = additive({"bf16": 1.5, "padded": 0.6, "full": 0.7})


def bf16_learns_less(precision, step):
    return 3.0 - (0.01 if precision == "fp32" else 0.008) * step


def bf16_alone_wins(choice):
    kind_factor = (
        1.0
        if choice["layout"] == "packed" and choice["activation_checkpointing"] == "none"
        else 0.7
    )
    size_factor = (
        1.0 if choice["micro_batch_size"] == STARTING["micro_batch_size"] else 0.8
    )
    return (
        1000
        * kind_factor
        * size_factor
        * (1.5 if choice["precision"] == "bf16" else 1.0)
    )


def test_equal_loss_allows_another_precision(tmp_path):
    search, confirmed = explored(tmp_path, BF16_WINS)
    assert (confirmed.adopted, confirmed.candidate["precision"]) == (True, "bf16")
    assert "0.00% apart, within 1%" in confirmed.equal_loss
    fp32, bf16 = checks_of(search)
    assert (fp32["precision"], bf16["precision"]) == ("fp32", "bf16")
    assert fp32 | {"precision": "bf16"} == bf16
    assert fp32["micro_batch_size"] == STARTING["micro_batch_size"]
    kept = evidence(search, confirmed)
    assert kept.configurations == len(FEW)
    assert kept.trials == len(search.state.tried) - 1 == len(kept.rows) - 1
    assert kept.windows == len(search.runner.finished)
    # Windows of the loss check belong to no row.
    assert sum(row.windows for row in kept.rows) == kept.windows - 2
    assert kept.seconds == pytest.approx(search.runner.seconds, abs=0.001)
    assert (kept.ratio_low, kept.ratio_high) == (
        confirmed.ratio.low,
        confirmed.ratio.high,
    )
    assert kept.chosen == kept.candidate != kept.starting
    starting_row = next(
        row for row in kept.rows if row.settings == kept.starting.settings
    )
    assert starting_row.ratio_to_starting is None
    assert (
        starting_row.windows
        == sum(
            configuration_of(finished.trial) == STARTING
            for finished in search.runner.finished
        )
        - 1
    )


FLOAT8 = {"compile": (False, True), "float8": ("none", "rowwise")}


@pytest.mark.parametrize(
    ("knob", "levels", "checks", "words"),
    [
        (
            "float8",
            FLOAT8,
            [("none", False), ("rowwise", True)],
            "with bf16, rowwise float8 and",
        ),
        (
            "attention",
            {"attention": ("auto", "fa4")},
            [("auto", False), ("fa4", False)],
            "",
        ),
    ],
    ids=["float8", "FlashAttention-4"],
)
@pytest.mark.parametrize("learns", [1.0, 0.5])
def test_low_precision_requires_equal_loss(
    tmp_path, knob, levels, checks, words, learns
):
    (usual, _), (value, compiled) = checks
    fixed = {name: values[:1] for name, values in LEVELS.items()}
    settings = settings_of(fixed | {"precision": ("fp32", "bf16")} | levels)
    cells = configuration_space(settings, settings.starting, 8)
    assert {
        (cell["precision"], cell["compile"]) for cell in cells if cell[knob] == value
    } == {("bf16", compiled)}

    def loss(name, step):
        return 3.0 - 0.01 * step * (learns if value in name else 1.0)

    search, confirmed = explored(
        tmp_path,
        additive({value: 2.0, "bf16": 1.2}),
        configurations=cells,
        settings=settings,
        loss=loss,
    )
    chosen = value if learns == 1.0 else usual
    assert (
        confirmed.adopted,
        confirmed.candidate[knob],
        confirmed.candidate["precision"],
    ) == (True, chosen, "bf16")
    assert words in confirmed.equal_loss
    assert [(config[knob], config["compile"]) for config in checks_of(search)][
        :2
    ] == checks


@pytest.mark.parametrize(
    ("changes", "reason", "checks"),
    [
        ({"loss": bf16_learns_less}, "not within 1%", 2),
        ({"loss": lambda *_: 3.0}, "not checked: with fp32 the loss went", 1),
        (
            {"instead": fails(lambda _, trial: trial.step_arguments.get("losses"))},
            "the run with fp32 failed (crashed)",
            1,
        ),
    ],
    ids=["learns less", "learns nothing", "check failed"],
)
def test_lower_precision_without_equal_loss_is_rejected(
    tmp_path, changes, reason, checks
):
    search, confirmed = explored(tmp_path, bf16_alone_wins, **changes)
    assert confirmed.ratio.low > 1
    assert reason in confirmed.equal_loss
    assert len(checks_of(search)) == checks
    kept = evidence(search, confirmed)
    assert (kept.adopted, kept.chosen) == (False, kept.starting)
    assert f"is faster, but was rejected: {confirmed.equal_loss}" in kept.choice


def test_fastest_of_same_precision_is_taken(tmp_path):
    search, confirmed = explored(tmp_path, BF16_WINS, loss=bf16_learns_less)
    assert (confirmed.adopted, confirmed.candidate["precision"]) == (True, "fp32")
    best = max(worth(BF16_WINS, cell) for cell in FEW if cell["precision"] == "fp32")
    assert worth(BF16_WINS, confirmed.candidate) >= 0.97 * best
    choice = evidence(search, confirmed).choice
    assert f"verified to be faster than {SETTINGS.words(STARTING)}; " in choice
    assert f"bf16 was rejected: {confirmed.equal_loss}" in choice
