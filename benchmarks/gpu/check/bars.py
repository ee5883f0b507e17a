"""What the figures of the check are held against, on an H100 or H200."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.bars import Bar
from benchmarks.gpu.check.results import CheckReport

UNITS = ("share", "ratio", "count", "nats", "s")
"""Those that figures end in; a logit has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBar:
    """A figure of a stage, and what it must be."""

    stage: str
    figure: str
    """Ends in its unit."""
    bar: float
    direction: Literal["<=", ">="]
    meaning: str

    @property
    def name(self) -> str:
        """Of the bar as scripts look for it."""
        return f"gpu_{self.stage}_{self.figure}"

    @property
    def unit(self) -> str:
        """In which the figure is."""
        return next((unit for unit in UNITS if self.figure.endswith(f"_{unit}")), "plain")


def most(stage: str, figure: str, bar: float, meaning: str) -> GpuBar:
    """A figure that must not be larger."""
    return GpuBar(stage=stage, figure=figure, bar=bar, direction="<=", meaning=meaning)


def least(stage: str, figure: str, bar: float, meaning: str) -> GpuBar:
    """A figure that must not be smaller."""
    return GpuBar(stage=stage, figure=figure, bar=bar, direction=">=", meaning=meaning)


GPU_BARS = (
    most("nvml", "gpm_worst_error_share", 0.05, "GPM's share of busy SMs against the known load: idle, full, half"),
    least("memory", "configurations_count", 12, "configurations, predicted and measured"),
    most("memory", "median_error_before_trials_share", 0.03, "median error of the predicted peak, before any trial"),
    most("memory", "median_error_after_calibration_share", 0.01, "median error of the peak, calibrated by one trial"),
    most("memory", "worst_error_before_trials_share", 0.06, "worst error of the predicted peak"),
    most("memory", "predicted_rows_above_true_share", 0.03, "predicted largest micro-batch above the true one, worst"),
    least("train", "bert_120m_mfu_share", 0.45, "MFU of 120M parameters"),
    least("train", "bert_350m_mfu_share", 0.50, "MFU of 350M parameters"),
    least("train", "against_paper_style_ratio", 15.0, "real tokens/s against the paper-style step"),
    least("train", "against_hf_trainer_ratio", 2.5, "real tokens/s against transformers' Trainer in bf16"),
    most("workers", "chosen_data_wait_share", 0.01, "data-wait that the swept worker counts leave"),
    most("maths", "varlen_to_plain_distance_ratio", 1.5, "varlen attention's distance to fp32 over the plain way's"),
    most("maths", "compiled_to_plain_distance_ratio", 1.5, "compiled layers' distance to fp32 over the plain way's"),
    most("maths", "documents_varlen_largest_change_of_others", 0.0, "what a document changes of others, varlen"),
    least("maths", "documents_varlen_least_change_of_itself", 1e-3, "what it changes of itself at least, varlen"),
    most("maths", "layouts_fp32_largest_loss_difference_nats", 1e-3, "a token's loss in packed against padded rows"),
    least("maths", "layouts_fp32_tokens_count", 1_000, "tokens whose loss was compared so"),
    most("maths", "waits_recompilations_count", 0, "graphs compiled after the first steps"),
    least("maths", "waits_steps_without_host_wait_count", 6, "steps in turn without waiting for the GPU"),
    most("tune", "all_models_s", 900, "autotune tune for both presets"),
    most("tune", "chosen_data_wait_share", 0.01, "data-wait that the tuned profiles leave"),
    least("endurance", "steps_without_retry_count", 2_000, "steps at the largest micro-batch without a second try"),
    most("saves", "asynchronous_of_synchronous_share", 0.20, "what an asynchronous save costs, of a synchronous one"),
)


def bars_of(report: CheckReport) -> tuple[Bar, ...]:
    """All bars; those of figures that were not measured stay open."""
    return tuple(
        Bar(
            name=one.name,
            figure=report.stage(one.stage).value(one.figure),
            unit=one.unit,
            bar=one.bar,
            direction=one.direction,
        )
        for one in GPU_BARS
    )
