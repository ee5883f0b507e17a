"""Lines of a run record, and the events in it, as tests need them."""

from trainer.formats.events import EventRow
from trainer.formats.run_record import EvaluationRow, StartUp, StepRow


def row_of(step: int, **changes) -> StepRow:
    values = {
        "step": step,
        "loss": 1.0,
        "grad_norm": 1.0,
        "learning_rate": 0.1,
        "step_s": 1.0,
        "data_wait_s": 0.0,
        "compute_s": 0.8,
        "communication_s": None,
        "optimizer_s": 0.1,
        "non_padding_tokens": 5,
        "padded_tokens": 8,
        "packing_efficiency": 0.625,
        "tokens_per_s": 5.0,
        "tokens_per_s_per_rank": 2.5,
        "padded_tokens_per_s": 8.0,
        "padded_tokens_per_s_per_rank": 4.0,
        "model_flops_per_s_per_rank": 1e9,
        "mfu": None,
        "mfu_6n": None,
        "peak_memory_bytes": 100,
        "gradient_noise_scale_tokens": None,
        "head_overflows": 0,
        "recompilations": 0,
        "skipped_steps": 0,
        "slowest_rank": None,
        "slowest_rank_ratio": None,
    }
    return StepRow(**values | changes)


def evaluation_of(step: int, **changes) -> EvaluationRow:
    values = {
        "loss": 1.0,
        "perplexity": 2.7,
        "masked_accuracy": 0.5,
        "predicted_tokens": 9,
        "rows": 3,
        "seconds": 0.1,
    }
    return EvaluationRow(step=step, **values | changes)


def event_of(step: int) -> EventRow:
    return EventRow(
        step=step,
        utc="2026-01-01T00:00:01Z",
        kind="spike",
        level="warning",
        action="warn",
        message="high",
        causes=["data"],
        next_step="look",
        values={"loss": "inf", "median": 2.5},
        samples=[3, 4],
    )


def startup_of() -> StartUp:
    """Return startup times of which every phase took half a second."""
    return StartUp(**dict.fromkeys(StartUp.model_fields, 0.5))
