"""Probes of your own steps: exact answers, and errors of steps that misbehave."""

import subprocess

import pytest

from autotune.errors import BadInput, ExceedsMemory, Undecided
from autotune.subjects.own.subject import LOOP_STEPS

pytestmark = pytest.mark.system


def test_finds_the_largest_size_that_fits(own_code):
    probe, runner = own_code.probe("behaves")
    tried = {row.size: row.fits for row in probe.sizes}
    assert tried[probe.feasible_max]
    assert not tried[probe.feasible_max + 1]
    assert probe.infeasible_min == probe.feasible_max + 1
    assert 0.97 * 80e6 < probe.feasible_peak_bytes <= 80e6
    assert len(probe.sizes) <= 9
    assert probe.optimizer_steps == 3
    again, runner = own_code.probe("behaves")
    assert again.feasible_max == probe.feasible_max
    assert all(finished.from_trial_log for finished in runner.finished)


def test_searches_sizes_in_multiples(own_code):
    probe, _ = own_code.probe(
        "behaves", along="seq_length", arguments={"micro_batch_size": 8}, multiple_of=64
    )
    assert probe.feasible_max % 64 == 0
    assert probe.infeasible_min == probe.feasible_max + 64


def test_stops_training_function_after_trial_steps(own_code):
    probe, _ = own_code.probe("trains", along="batch_size")
    assert probe.trains
    assert probe.optimizer_steps == 3


def test_too_few_optimizer_steps_are_an_error(own_code):
    with pytest.raises(BadInput, match="returned NoneType after 2 optimizer steps"):
        own_code.probe("trains", along="batch_size", arguments={"steps": 2})


def test_runs_calls_of_several_steps(own_code):
    probe, _ = own_code.probe("critic")
    assert not probe.trains
    whole, _ = own_code.probe("critic", arguments={"critic_steps": 0})
    assert abs(probe.feasible_max - whole.feasible_max) <= 4
    loop, _ = own_code.probe("critic", max_size=5, arguments={"critic_steps": 10**6})
    assert loop.trains
    assert loop.optimizer_steps == LOOP_STEPS


def test_follows_accumulation_to_the_second_step(own_code):
    probe, _ = own_code.probe("accumulates", max_size=5)
    assert probe.optimizer_steps == 3
    # Weights' gradients, and the state of two moments.
    assert probe.feasible_peak_bytes > 3 * 4 * 2048 * 512


def test_memory_that_settles_does_not_vary(own_code):
    assert own_code.probe("grows_to_a_plateau", max_size=5)[0].varies_bytes == 0


def test_late_import_does_not_count_as_memory(own_code):
    probe, runner = own_code.probe("imports_late")
    assert [
        finished.trial.measured.get("attempt", 0) for finished in runner.finished[:2]
    ] == [
        0,
        1,
    ]
    assert probe.feasible_max > 4


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        (
            "hangs",
            Undecided,
            (
                r"did not end within its time limit at micro_batch_size=4: killed after"
                r" 4 s:\n.*hostile.py"
            ),
        ),
        ("exits", BadInput, r"ended its process: sys.exit\(3\)"),
        (
            "vanishes",
            BadInput,
            r"ended its process at micro_batch_size=4 \(exit code 0\)",
        ),
        (
            "segfaults",
            BadInput,
            r"ended its process at micro_batch_size=4 \(exit code -11\)",
        ),
        (
            "raises",
            BadInput,
            r"failed at micro_batch_size=4: ZeroDivisionError(.|\n)*hostile.py",
        ),
        (
            "takes_host_memory",
            ExceedsMemory,
            r"exceeds the memory budget of 76.3 MiB at micro_batch_size=1",
        ),
        ("leaks", BadInput, r"leaks memory: 16 MiB more after each step"),
        (
            "varies",
            BadInput,
            r"changes its memory between steps: 3[\d.]+ MiB of difference",
        ),
        ("ignores", BadInput, r"seems to ignore micro_batch_size"),
        (
            "of_a_small_dataset",
            BadInput,
            r"seems to ignore .* at micro_batch_size=\d{3,} as at .*=\d{3,}",
        ),
        (
            "skips",
            BadInput,
            (
                r"took \d optimizer steps in 3 calls at .*, and one in each at"
                r" micro_batch_size=4"
            ),
        ),
        ("never_steps", BadInput, r"took no optimizer step in 64 calls"),
        (
            "takes_a_batch",
            BadInput,
            r"requires an argument, which a probe does not have",
        ),
        ("builds_nothing", BadInput, r"returned int after 0 optimizer steps"),
        ("missing", BadInput, r"'hostile' \(.*hostile.py\) has no function 'missing'"),
        ("NUMBER", BadInput, r"is not callable: it is a int"),
    ],
)
def test_misbehaving_step_is_named(own_code, name, kind, words):
    with pytest.raises(kind, match=words) as caught:
        own_code.probe(name, timeout_s=4 if name == "hangs" else 20, max_size=2**14)
    assert "autotune/trials/jobs" not in caught.value.message
    assert caught.value.next_step
    probe, _ = own_code.probe("behaves", max_size=4)  # the same server continues
    assert probe.feasible_max == 4


@pytest.mark.parametrize("name", ["forks", "prints"])
def test_measures_step_that_prints_or_forks(own_code, capfd, name):
    probe, _ = own_code.probe(name, max_size=5)
    assert probe.feasible_max == 5
    assert "{{" not in capfd.readouterr().out
    assert not subprocess.run(
        ["pgrep", "-f", "sleep 1234.5"], capture_output=True, check=False
    ).stdout


def test_accepts_varying_memory_on_request(own_code):
    probe, _ = own_code.probe("varies", allow_varying=True, max_size=8)
    assert probe.varies_bytes > 20 * 2**20
