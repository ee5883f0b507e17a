"""A scripted GPU: how much memory rows take on it, and how long trials."""

from autotune.core.outcome import Crashed, Measured, OutOfMemory, TimedOut
from tests.fakes import FakeClock

ROW_BYTES, FIXED_BYTES, TRIAL_S = 300 * 2**20, 4 * 2**30, 5.0


def card(clock: FakeClock, trial_s: float = TRIAL_S, step_s_per_row: float = 0.01):
    """A GPU on which a row takes 300 MiB, and a trial some seconds; nothing can be traced.

    Args:
        clock: Its time.
        trial_s: Of a trial, beside its steps.
        step_s_per_row: Of a step.
    """

    def simulate(trial):
        if trial.job == "trace":
            return Crashed(detail="there is no model here")
        config, measured = trial.measured["config"], trial.measured
        rows, steps = config["micro_batch_rows"], measured["warmup_steps"] + measured["timed_steps"]
        seconds = trial_s + steps * rows * step_s_per_row
        if trial.timeout_s < seconds:
            clock.sleep(trial.timeout_s)
            return TimedOut(detail="late")
        clock.sleep(seconds)
        peak_bytes = FIXED_BYTES + rows * ROW_BYTES
        budget_bytes = measured["memory_budget_bytes"]
        if budget_bytes and peak_bytes > budget_bytes:
            return OutOfMemory(detail="refused")
        figures = {"optimizer_steps": steps, "step_s": [rows * step_s_per_row], "slot_tokens_per_step": rows * 512}
        return Measured(figures=figures | {"peak_bytes": peak_bytes, "outside_allocator_bytes": 2**29, "loss": 10.0})

    return simulate
