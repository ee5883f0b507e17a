"""Errors of models that cannot be predicted, or do not fit, as one."""

from autotune.errors import ExceedsMemory
from autotune.memory.estimate import CannotTrace
from autotune.memory.prediction import joined_error

PROBE = "autotune probe --model a --data DIR"
UNTRACEABLE = "Measure it on the machine that will train: autotune probe"


def test_joined_error_has_all_messages():
    errors = [
        CannotTrace("a cannot be traced", next_step=UNTRACEABLE),
        ExceedsMemory("b does not fit", next_step="Use more memory."),
    ]
    joined = joined_error(errors, PROBE)
    assert joined.message == "a cannot be traced\nb does not fit"
    assert joined.next_step == (
        f"Measure it on the target machine: {PROBE}\n  Use more memory."
    )


def test_joined_error_names_a_next_step_once():
    errors = [
        CannotTrace(f"{model} cannot be traced", next_step=UNTRACEABLE)
        for model in ("a", "b")
    ]
    joined = joined_error(errors, PROBE)
    assert joined.next_step == f"Measure it on the target machine: {PROBE}"


def test_joined_error_has_the_exit_code_of_the_first():
    too_large = ExceedsMemory("b does not fit", next_step="Use more memory.")
    untraceable = CannotTrace("a cannot be traced", next_step=UNTRACEABLE)
    exit_code = too_large.exit_code
    assert exit_code != untraceable.exit_code
    assert joined_error([too_large, untraceable], PROBE).exit_code == exit_code
