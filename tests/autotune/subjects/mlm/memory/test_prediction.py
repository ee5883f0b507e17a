"""One error for several models that cannot be traced or do not fit."""

from autotune.errors import ExceedsMemory
from autotune.memory.estimate import CannotTrace
from autotune.subjects.mlm.memory.prediction import joined_error

PROBE_COMMAND = "autotune probe --model a --data DIR"
MEASURE_STEP = "Measure it on the machine that will train: autotune probe"
"""Next step of a single model that cannot be traced."""


def test_joined_error_has_all_messages():
    errors = [
        CannotTrace("a cannot be traced", next_step=MEASURE_STEP),
        ExceedsMemory("b does not fit", next_step="Use more memory."),
    ]
    joined = joined_error(errors, PROBE_COMMAND)
    assert joined.message == "a cannot be traced\nb does not fit"
    assert joined.next_step == (
        f"Measure it on the target machine: {PROBE_COMMAND}\n  Use more memory."
    )


def test_joined_error_names_a_next_step_once():
    errors = [
        CannotTrace(f"{model} cannot be traced", next_step=MEASURE_STEP)
        for model in ("a", "b")
    ]
    joined = joined_error(errors, PROBE_COMMAND)
    assert joined.next_step == f"Measure it on the target machine: {PROBE_COMMAND}"


def test_joined_error_has_the_first_exit_code():
    too_large = ExceedsMemory("b does not fit", next_step="Use more memory.")
    untraceable = CannotTrace("a cannot be traced", next_step=MEASURE_STEP)
    exit_code = too_large.exit_code
    assert exit_code != untraceable.exit_code
    assert joined_error([too_large, untraceable], PROBE_COMMAND).exit_code == exit_code
