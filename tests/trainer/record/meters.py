"""Rows of the intervals of a meter that tests close."""

from trainer.formats.run_record import StepRow
from trainer.record.meter import Meter

LOOP_FIELDS = {
    "learning_rate": 1e-3,
    "head_overflows": 3,
    "recompilations": 2,
    "skipped_steps": 4,
}
"""Fields of a row that the training loop passes."""
LEAST_TORCH_BYTES = 2**27
"""Memory that every process with torch exceeds."""


def close_interval(meter: Meter, *, step: int = 1) -> StepRow:
    """Close the meter's interval after a step, and return its row."""
    meter.close(step, **LOOP_FIELDS)
    (row,) = meter.take_rows()
    return row
