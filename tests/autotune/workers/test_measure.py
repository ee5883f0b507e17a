import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autotune.errors import OutOfTime, Undecided
from autotune.machine.values import DiskFacts
from autotune.profiles.store import with_data
from autotune.trials.runner import ATTEMPTS
from autotune.trials.values import (
    Contaminated,
    Crashed,
    GpuUseFigures,
    Measured,
    TrainingFigures,
    Trial,
)
from autotune.workers.joint_search import gap_remains, search_joint, study_of
from autotune.workers.measure import evidence, gpu_source, training_trial
from testbed.examples.feeds import (
    CONFIG,
    LIMITS,
    ON_CPU,
    FeedMachine,
    figures_of,
    knee_at,
    loader_of,
    sweep_on,
)
from testbed.examples.trials import FEED
from testbed.fakes import FakeMachine
from tests.autotune.machine.test_measured_device import H200

GPU = {
    "samples": 10,
    "utilisation_share": 0.9,
    "power_w": 400.0,
    "sm_clock_mhz": 1500.0,
    "power_capped_share": 0.5,
    "gpm_windows": 2,
    "gpm_tensor_share": 0.4,
    "series": {"time_s": [1.0]},
}

DEAD = Crashed(
    detail="RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error"
)
ON_GPU = replace(ON_CPU, device="cuda", gpus=(H200,), gpu_absent=None)


def evidence_of(sweep, site=ON_CPU):
    return evidence(sweep, sweep.run(), site)


@pytest.mark.parametrize("needed", [0, 1, 3, 6])
def test_the_smallest_count_that_feeds_the_step_is_found(tmp_path, needed):
    found = evidence_of(sweep_on(FeedMachine(knee_at(needed)), tmp_path))
    assert (found.chosen, found.undecided_between) == (needed, [])
    rows = {row.num_workers: row for row in found.rows}
    assert rows[needed].verdict == "verified"
    assert rows[needed].ratio_to_cached == pytest.approx(1.0, abs=0.01)
    assert all(rows[count].verdict == "refuted" for count in rows if count < needed)
    assert found.cached_padded_tokens_per_s[0] == pytest.approx(1000.0, rel=0.01)


def test_rounds_run_forwards_and_backwards_in_turn_and_what_a_sweep_rests_on_is_kept(
    tmp_path,
):
    machine, limits = FeedMachine(knee_at(1)), replace(LIMITS, local_ranks=2)
    lustre = DiskFacts(
        path="data", filesystem_type="lustre", free_bytes=None, is_network=True
    )
    sweep = sweep_on(
        machine, tmp_path, replayed_step_s=0.06, sample_delay_s=0.001, limits=limits
    )
    found = evidence_of(
        sweep, replace(ON_CPU, host=replace(ON_CPU.host, disks=(lustre,)))
    )
    assert machine.counts[:4] == [None, 0, 1, None]
    rounds = [trial.measured["round"] for trial in machine.trials]
    assert rounds == sorted(rounds)
    assert (
        len({trial.key for trial in machine.trials})
        == len(machine.trials)
        == found.windows
        == found.seconds
    )
    slowed = {
        (trial.measured["sample_delay_s"], trial.measured["replayed_step_s"])
        for trial in machine.trials
    }
    assert slowed == {(0.001, 0.06)}
    assert {trial.local["data_dir"] for trial in machine.trials} == {
        str(Path("data").resolve())
    }
    assert found.consumer == "a replayed step of 60 ms, each sample delayed by 1 ms"
    assert (found.local_ranks, found.max_workers) == (2, 4)
    assert found.max_workers_because == "8 available CPU cores, 2 local ranks"
    assert (found.data_filesystem, found.data_on_network) == ("lustre", True)
    assert found.windows == sum(
        len(row.padded_tokens_per_s) for row in found.rows
    ) + len(found.cached_padded_tokens_per_s)
    assert (found.rows[1].memory_bytes, found.rows[1].storage_bytes_per_s) == (
        2**30,
        1e6,
    )
    assert ({row.gpu for row in found.rows}, found.operating_state) == ({None}, None)


def test_a_sweep_that_was_interrupted_goes_on_where_it_was_but_not_on_another_file_system(
    tmp_path,
):
    number = itertools.count()

    def interrupt(trial):
        if next(number) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep_on(FeedMachine(knee_at(2), interrupt), tmp_path, storage="nfs:40").run()
    whole, rest, moved = (FeedMachine(knee_at(2)) for _ in range(3))
    expected = evidence_of(sweep_on(whole, tmp_path / "other", storage="nfs:40"))
    assert evidence_of(sweep_on(rest, tmp_path, storage="nfs:40")) == expected
    # The round that was cut in two is read anew: its windows belong beside each other.
    assert len(rest.trials) == len(whole.trials) - 4
    sweep_on(moved, tmp_path, storage="ext4:2").run()
    assert len(moved.trials) == len(whole.trials)


def noisy(knee: int) -> FeedMachine:
    """Windows that differ by so much that a short budget decides nothing."""
    number = itertools.count(1)

    def wild(trial):
        factor = 1 + 0.1 * ((7 * next(number)) % 11 - 5) / 5
        figures = figures_of(trial, knee_at(knee))
        return Measured(
            figures=figures
            | {"padded_tokens_per_s": figures["padded_tokens_per_s"] * factor}
        )

    return FeedMachine(knee_at(knee), wild)


def test_the_budget_ends_a_sweep_and_what_is_open_is_said(tmp_path):
    sweep = sweep_on(noisy(3), tmp_path, budget_s=12.0)
    found = evidence_of(sweep)
    assert sweep.time_is_over
    assert 12 <= len(sweep.runner.machine.trials) <= 12 + 3
    low, high = found.undecided_between
    assert low <= 3 <= high
    assert found.choice.startswith(
        f"undecided between {low} and {high} after 12 s; num_workers={found.chosen}: "
    )
    # Windows from the trial log count towards it.
    again = sweep_on(noisy(3), tmp_path, budget_s=12.0)
    assert evidence_of(again) == found
    assert again.runner.machine.trials == []
    small = sweep_on(noisy(1), tmp_path / "small", budget_s=0.5)
    small.run()
    assert len(small.rounds) == 3


def test_a_sweep_that_has_to_end_ends_with_what_is_known_if_that_is_three_rounds(
    tmp_path,
):
    late, too_late = (
        sweep_on(noisy(3), tmp_path / "late"),
        sweep_on(noisy(3), tmp_path / "too late"),
    )
    for sweep, seconds in ((late, 13.5), (too_late, 4.5)):
        sweep.runner.budget_ends_s = sweep.runner.clock.utc_now().timestamp() + seconds
    assert evidence_of(late).undecided_between
    assert (len(late.runner.machine.trials), late.time_is_over) == (13, True)
    with pytest.raises(OutOfTime):
        too_late.run()


def contaminated(times: int) -> FeedMachine:
    """Every window of one worker is spoiled so many times before it is read."""
    spoiled = Counter[str]()

    def spoil(trial):
        spoiled[trial.key] += not trial.measured["cached"]
        return (
            Contaminated(detail="somebody else was on it")
            if 0 < spoiled[trial.key] <= times
            else None
        )

    return FeedMachine(knee_at(1), spoil)


def test_a_spoiled_window_is_read_again_but_not_for_ever_and_one_that_failed_is_no_score_and_not_tried_again(
    tmp_path,
):
    found = evidence_of(sweep_on(contaminated(ATTEMPTS - 1), tmp_path / "once"))
    assert (found.chosen, found.undecided_between) == (1, [])
    machine = contaminated(ATTEMPTS)
    with pytest.raises(Undecided, match="somebody else was on it") as refused:
        sweep_on(machine, tmp_path).run()
    assert machine.counts.count(0) == ATTEMPTS
    assert "resumes from" in refused.value.next_step
    machine = FakeMachine(lambda trial: Crashed(detail="boom"))
    with pytest.raises(Undecided, match="boom"):
        sweep_on(machine, tmp_path / "failed").run()
    assert len(machine.trials) == 1


def test_utilisation_and_counters_are_means_over_windows_and_gpus(tmp_path):
    gpus = [GPU, GPU | {"utilisation_share": 0.7, "gpm_tensor_share": None}]
    found = evidence_of(sweep_on(FeedMachine(knee_at(1), gpus=gpus), tmp_path), ON_GPU)
    for row in found.rows:
        used = [
            row.gpu.utilisation_share,
            row.gpu.gpm_tensor_share,
            row.gpu.gpm_dram_share,
        ]
        assert used == [pytest.approx(0.8), pytest.approx(0.4), None]
    assert (
        found.operating_state
        == "400 W, SM clock 1,500 MHz, at the power cap in 50 % of samples"
    )


@pytest.mark.parametrize(("asked", "at_first"), [(None, 8), (6, 6)])
def test_workers_that_turn_out_larger_lower_the_limit(tmp_path, asked, at_first):
    host = replace(LIMITS.host, ram_available_bytes=4 * 2**30)
    machine = FeedMachine(knee_at(20), worker_bytes=2**30)
    sweep = sweep_on(machine, tmp_path, limits=replace(LIMITS, host=host, asked=asked))
    assert sweep.max_workers == at_first
    found = evidence_of(sweep)
    assert max(filter(None, machine.counts)) == found.max_workers == found.chosen == 3
    assert "(measured)" in found.max_workers_because


def test_a_count_whose_workers_die_is_the_limit(tmp_path):
    machine = FeedMachine(
        knee_at(20), lambda trial: DEAD if loader_of(trial)["num_workers"] > 4 else None
    )
    found = evidence_of(sweep_on(machine, tmp_path))
    assert found.max_workers == found.chosen == 4
    assert "num_workers=8" in found.max_workers_because


@pytest.mark.parametrize(
    ("site", "use", "replayed", "said", "unsaid"),
    [
        (ON_CPU, None, False, ["n/a (CPU run: no driver)"], "NVML"),
        (ON_GPU, None, True, ["n/a (simulated step)"], "NVML"),
        (
            ON_GPU,
            None,
            False,
            ["NVML utilisation: n/a (no samples)", "GPM: n/a (no counters)"],
            "MFU",
        ),
        (
            ON_GPU,
            {"lacking": "lost", "gpm_windows": 1},
            False,
            ["NVML utilisation: n/a (lost)"],
            "MFU",
        ),
        (
            ON_GPU,
            {"samples": 3, "gpm_lacking": "no Hopper"},
            False,
            ["GPM: n/a (no Hopper)"],
            "GPM counters",
        ),
        (
            ON_GPU,
            {"samples": 3, "utilisation_share": 0.9, "gpm_windows": 1},
            False,
            ["NVIDIA H200; NVML utilisation", "GPM counters"],
            "n/a",
        ),
    ],
)
def test_sources_are_named_with_what_they_do_not_mean_or_why_they_are_missing(
    site, use, replayed, said, unsaid
):
    gpus = () if use is None else (GpuUseFigures(**use),)
    found = gpu_source(
        site,
        [replace(TrainingFigures.of(Measured(figures=FEED)), gpus=gpus)],
        replayed=replayed,
    )
    assert all(words in found for words in said)
    assert unsaid not in found


FEW_WORKERS = replace(LIMITS, asked=3)


def prefetching_helps(data) -> float:
    """No count gets beyond 60 % of the ceiling, unless much is held ready."""
    return 0.2 * data.num_workers * (1.5 if data.prefetch_factor == 8 else 1.0) + 0.01


def finished(rate, directory, limits=FEW_WORKERS):
    sweep = sweep_on(FeedMachine(rate), directory, limits=limits)
    return sweep, sweep.run()


def settings_of(sweep):
    return [loader_of(one.trial) for one in sweep.runner.finished]


def test_what_is_proven_to_be_faster_is_adopted_and_the_same_ledger_gives_the_same(
    tmp_path,
):
    sweep, choice = finished(prefetching_helps, tmp_path)
    found = search_joint(sweep, choice, trials=15)
    assert (found.adopted, found.num_workers, found.prefetch_factor) == (True, 3, 8)
    assert found.ratio_to_workers_alone == pytest.approx(1.5, rel=0.03)
    assert 1 < found.ratio_low <= found.ratio_to_workers_alone
    # As it was: there is no GPU.
    assert {data["pin_memory"] for data in settings_of(sweep)} == {True}
    again, same = finished(prefetching_helps, tmp_path)
    assert search_joint(again, same, trials=15) == found
    assert again.runner.machine.trials == []


def test_what_is_not_faster_is_not_adopted_and_each_trial_stands_beside_its_ceiling(
    tmp_path,
):
    sweep, choice = finished(lambda data: 0.2 * data.num_workers + 0.01, tmp_path)
    assert gap_remains(choice)
    assert not gap_remains(finished(knee_at(2), tmp_path / "none")[1])
    before, kept = len(sweep.runner.finished), evidence(sweep, choice, ON_CPU)
    assert search_joint(sweep, choice, trials=0) is None
    assert not search_joint(sweep, choice, trials=6).adopted
    searched = [
        one.trial.measured for one in sweep.runner.finished[before : before + 12]
    ]
    pairs = zip(searched[::2], searched[1::2], strict=True)
    assert all({one["cached"] for one in pair} == {True, False} for pair in pairs)
    assert [one["round"] for one in searched] == [
        len(sweep.rounds) + number // 2 for number in range(12)
    ]
    after = evidence(sweep, choice, ON_CPU)
    assert (after.chosen, after.rows, after.choice) == (
        kept.chosen,
        kept.rows,
        kept.choice,
    )


def test_settings_that_memory_does_not_hold_are_not_tried_and_those_whose_workers_die_are_left_out(
    tmp_path,
):
    tight = replace(FEW_WORKERS, host=replace(LIMITS.host, shm_free_bytes=16 * 2**20))
    sweep, choice = finished(prefetching_helps, tmp_path, limits=tight)
    search_joint(sweep, choice, trials=15)
    for data in settings_of(sweep):
        limits = replace(tight, prefetch_factor=data["prefetch_factor"])
        assert limits.refusal(data["num_workers"]) is None
    assert len({data["prefetch_factor"] for data in settings_of(sweep)}) > 1
    machine = FeedMachine(
        prefetching_helps,
        lambda trial: DEAD if loader_of(trial)["prefetch_factor"] == 8 else None,
    )
    sweep = sweep_on(machine, tmp_path / "dead", limits=FEW_WORKERS)
    found = search_joint(sweep, sweep.run(), trials=10)
    assert found.prefetch_factor != 8
    assert not found.adopted


def test_the_study_holds_the_ratio_of_every_window_inside_to_the_ceiling_of_its_round(
    tmp_path,
):
    sweep = sweep_on(FeedMachine(knee_at(2)), tmp_path)
    sweep.run()
    study = study_of(sweep.runner.finished, sweep.max_workers, pinning=False)
    expected = [count for count in sweep.runner.machine.counts if count is not None]
    assert [trial.params["num_workers"] for trial in study.trials] == expected
    assert {
        (trial.params["prefetch_factor"], len(trial.params)) for trial in study.trials
    } == {(2, 2)}
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    for trial in study.trials:
        expected = knee_at(2)(
            CONFIG.data.model_copy(update={"num_workers": trial.params["num_workers"]})
        )
        assert trial.value == pytest.approx(expected, rel=0.005)
    with_pinning = study_of(sweep.runner.finished, sweep.max_workers, pinning=True)
    # As on a GPU.
    assert {trial.params["pin_memory"] for trial in with_pinning.trials} == {True}
    others = {
        "a prefetch that is not searched": (1, 3),
        "more than are allowed": (50, 2),
        "inside": (1, 4),
    }
    loaders = {
        name: {"num_workers": count, "prefetch_factor": ahead}
        for name, (count, ahead) in others.items()
    }
    windows = {name: with_data(CONFIG, loader) for name, loader in loaders.items()}
    alone = training_trial(
        sweep.training, with_data(CONFIG, {"num_workers": 1}), 100, []
    )
    sweep.read_windows(100, [(alone, "without its ceiling")])
    ceiling = training_trial(sweep.training, CONFIG, 101, [], cached=True)
    beside = [
        (training_trial(sweep.training, config, 101, []), name)
        for name, config in windows.items()
    ]
    sweep.read_windows(101, [(ceiling, "ceiling"), *beside])
    sweep.runner.machine._simulate = lambda trial: Crashed(detail="boom")
    sweep.runner.run(
        Trial(job="training", measured={"cached": False}, timeout_s=1), "crashes"
    )
    further = study_of(sweep.runner.finished, sweep.max_workers, pinning=False).trials[
        len(study.trials) :
    ]
    assert [trial.params for trial in further] == [
        {"num_workers": 1, "prefetch_factor": 4}
    ]
