"""Probes of steps of one's own: exact answers, and what is said of steps that
misbehave."""

import subprocess

import pytest

from autotune.errors import BadInput, ExceedsMemory, Undecided
from autotune.integrations.values import LOOP_STEPS

pytestmark = pytest.mark.system


def test_the_largest_size_ran_and_the_next_ran_out_of_memory(own):
    found, runner = own.probe("behaves")
    tried = {row.size: row.fits for row in found.rows}
    assert tried[found.feasible_max]
    assert not tried[found.feasible_max + 1]
    assert found.infeasible_min == found.feasible_max + 1
    assert 0.97 * 80e6 < found.feasible_peak_bytes <= 80e6
    assert len(found.rows) <= 9
    assert found.optimizer_steps == 3
    again, runner = own.probe("behaves")
    assert again.feasible_max == found.feasible_max
    assert all(one.from_trial_log for one in runner.finished)


def test_another_size_is_searched_in_multiples(own):
    found, _ = own.probe(
        "behaves", along="seq_length", arguments={"micro_batch_size": 8}, multiple_of=64
    )
    assert found.feasible_max % 64 == 0
    assert found.infeasible_min == found.feasible_max + 64


def test_a_training_function_is_stopped_after_the_steps_of_a_trial(own):
    found, _ = own.probe("trains", along="batch_size")
    assert found.trains
    assert found.optimizer_steps == 3
    with pytest.raises(BadInput, match="returned NoneType after 2 optimizer steps"):
        own.probe("trains", along="batch_size", arguments={"steps": 2})


def test_calls_of_several_optimizer_steps_run_to_their_end(own):
    found, _ = own.probe("critic")
    assert not found.trains
    whole, _ = own.probe("critic", arguments={"critic_steps": 0})
    assert abs(found.feasible_max - whole.feasible_max) <= 4
    loop, _ = own.probe("critic", max_size=5, arguments={"critic_steps": 10**6})
    assert loop.trains
    assert loop.optimizer_steps == LOOP_STEPS


def test_gradients_that_accumulate_over_calls_are_followed_to_the_second_optimizer_step(
    own,
):
    found, _ = own.probe("accumulates", max_size=5)
    assert found.optimizer_steps == 3
    # Weights' gradients, and the state of two moments.
    assert found.feasible_peak_bytes > 3 * 4 * 2048 * 512


def test_memory_that_settles_within_the_steps_of_a_trial_does_not_vary(own):
    assert own.probe("grows_to_a_plateau", max_size=5)[0].varies_bytes == 0


def test_what_is_imported_late_does_not_count_as_memory(own):
    found, runner = own.probe("imports_late")
    assert [done.trial.measured.get("attempt", 0) for done in runner.finished[:2]] == [
        0,
        1,
    ]
    assert found.feasible_max > 4


@pytest.mark.parametrize(
    ("name", "kind", "said"),
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
def test_a_step_that_misbehaves_is_survived_and_named(own, name, kind, said):
    with pytest.raises(kind, match=said) as caught:
        own.probe(name, timeout_s=4 if name == "hangs" else 20, max_size=2**14)
    assert "autotune/trials/jobs" not in caught.value.message
    assert caught.value.next_step
    found, _ = own.probe("behaves", max_size=4)  # the same server continues
    assert found.feasible_max == 4


@pytest.mark.parametrize("name", ["forks", "prints"])
def test_a_step_that_prints_or_forks_is_measured_all_the_same(own, capfd, name):
    found, _ = own.probe(name, max_size=5)
    assert found.feasible_max == 5
    assert "{{" not in capfd.readouterr().out
    assert not subprocess.run(
        ["pgrep", "-f", "sleep 1234.5"], capture_output=True, check=False
    ).stdout


def test_steps_that_differ_are_accepted_on_request(own):
    found, _ = own.probe("varies", allow_varying=True, max_size=8)
    assert found.varies_bytes > 20 * 2**20
