"""Figures that have a target: those quoted alone, and the list of all."""

from collections.abc import Mapping, Sequence

from autotune.base.units import format_bytes
from benchmarks.page_figures.formats import Figures, Rows, percent, row, times
from benchmarks.page_figures.recorded import Json, RecordedFigures

QUOTED: Mapping[str, int] = {
    "advice_simulated_causes_right_share": 1,
    "bert-120m_predicted_mfu_float8_%": 0,
    "bert-350m_predicted_mfu_float8_%": 0,
    "checkpoint_stall_of_synchronous_share": 1,
    "cpu_configurations": 0,
    "cpu_error_median_%": 0,
    "cpu_error_worst_%": 0,
    "cpu_pairs_in_order_%": 0,
    "event_waits_per_step": 1,
    "feed_packed_real_tokens_ratio": 0,
    "largest_exact_or_one_off_%": 0,
    "network_worst_step_error_2_hosts_share": 1,
    "network_worst_step_error_4_hosts_share": 1,
    "own_code_added_lines_count": 0,
    "own_code_exact_count": 0,
    "own_code_exact_on_gpu_count": 0,
    "own_code_seconds_against_lightning_ratio": 2,
    "own_code_trials_against_accelerate_ratio": 2,
    "own_code_trials_against_lightning_ratio": 2,
    "own_code_workers_right_count": 0,
    "peak_error_compiled_worst_%": 2,
    "peak_error_worst_%": 2,
    "probe_seconds_against_accelerate_ratio": 1,
    "probe_seconds_against_lightning_ratio": 1,
    "probe_trials_against_accelerate_ratio": 1,
    "probe_trials_against_lightning_ratio": 1,
    "promise_half_width_median_share": 0,
    "published_error_median_%": 0,
    "residual_train_loss_difference_errors": 1,
    "residual_validation_loss_difference_errors": 1,
    "residual_validation_loss_difference_share": 1,
    "train_against_hf_trainer_ratio": 2,
    "train_esm_against_padded_ratio": 1,
    "train_eurobert_against_padded_ratio": 1,
    "train_hf_recipe_difference_share": 0,
    "train_loss_difference_share": 1,
    "tune_explore_most_trials_share": 1,
    "tune_of_grid_best_share": 1,
    "workers_simulated_right_share": 1,
}
"""Decimals of each figure that pages quote by its name."""
_VERDICTS = {True: "ok", False: "**short**", None: "not measured"}
_SIGNS = {"<=": "\N{LESS-THAN OR EQUAL TO}", ">=": "\N{GREATER-THAN OR EQUAL TO}"}


def figures(recorded: RecordedFigures) -> Figures:
    """Return each figure that is quoted by its name, and all targets."""
    bars = {bar["name"]: bar for bar in recorded.bars}
    quoted: Figures = {
        name: quoted_figure(bars[name], digits) for name, digits in QUOTED.items()
    }
    return quoted | {
        "targets.count": str(len(recorded.bars)),
        "targets.met": _which_are_met(recorded.bars),
        "targets": target_rows(recorded.bars),
    }


def quoted_figure(bar: Json, digits: int) -> str:
    """Return a figure with its unit and a number of decimals."""
    figure, unit = bar["figure"], bar["unit"]
    if figure is None:
        return "n/a"
    if unit == "ratio":
        return times(figure, digits)
    if unit == "share":
        return percent(figure, digits)
    return f"{figure:.{digits}f} %" if unit == "%" else f"{figure:.{digits}f}"


def target_rows(bars: Sequence[Json]) -> Rows:
    """Return name, figure, target and verdict of each figure."""
    rows = []
    for bar in bars:
        target = f"{_SIGNS[bar['direction']]} {_with_unit(bar['bar'], bar['unit'])}"
        figure = _with_unit(bar["figure"], bar["unit"])
        rows.append(row(f"`{bar['name']}`", figure, target, _VERDICTS[bar["holds"]]))
    return rows


def _with_unit(figure: float | None, unit: str) -> str:
    if figure is None:
        return "n/a"
    if unit == "bytes":
        return format_bytes(round(figure))
    if unit == "share":
        return f"{figure * 100:.2f} %"
    return f"{figure:.3g} s" if unit == "s" else f"{figure:.3g}"


def _which_are_met(bars: Sequence[Json]) -> str:
    missed = [bar["name"] for bar in bars if not bar["holds"]]
    return f"are met except {', '.join(missed)}" if missed else "are met"
