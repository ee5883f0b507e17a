"""Figures of two CPU cores: training, promises, losses and decisions."""

import statistics
from collections import defaultdict

from autotune.base.units import format_count, format_percent, format_share
from benchmarks.page_figures.formats import Figures, Rows, row, speedup, times
from benchmarks.page_figures.recorded import Json, RecordedFigures


def figures(recorded: RecordedFigures) -> Figures:
    """Return the figures that were measured on two CPU cores."""
    benchmarks = recorded.benchmarks
    return {
        **_training(benchmarks["train"]),
        **_promises(benchmarks["promise"]),
        **_residual_stream(benchmarks["residual"]),
        **_decisions(recorded),
    }


def _training(train: Json) -> Figures:
    rows, over_hf_trainer = [], []
    for name, setting in train["settings"].items():
        rates = {
            trainer: statistics.median(repeats)
            for trainer, repeats in setting["tokens_per_s"].items()
        }
        ratio = rates["ours"] / rates["HF Trainer"]
        over_paper = times(rates["ours"] / rates["paper"], 2)
        over_hf_trainer.append(ratio)
        rows.append(row(name, over_paper, times(ratio, 2)))
    return {
        "train.speedups": rows,
        "train.least_over_hf_trainer": times(min(over_hf_trainer)),
    }


def _promises(promise: Json) -> Figures:
    return {
        "promise.minutes": f"{promise['minutes']:g}",
        "promise.machine_half_width": format_percent(
            promise["machine_half_width_share"]
        ),
        "promise.promises": [promise_row(entry) for entry in promise["promises"]],
    }


def promise_row(promise: Json) -> list[str]:
    """Return promised and delivered tokens/s of a configuration."""
    half_width = delivered = ratio = "n/a"
    if promise["half_width_share"] is not None:
        half_width = f"± {format_share(promise['half_width_share'])}"
    promised_per_s = promise["promised_tokens_per_s"]
    delivered_per_s = promise["delivered_tokens_per_s"]
    if delivered_per_s is not None:
        delivered = format_count(delivered_per_s)
        ratio = f"{delivered_per_s / promised_per_s:.3f}"
    kept = {True: "yes", False: "**no**", None: "not known"}[promise["kept"]]
    promised = format_count(promised_per_s)
    return row(promise["name"], promised, half_width, delivered, ratio, kept)


def _residual_stream(residual: Json) -> Figures:
    return {
        "residual.steps": format_count(residual["steps"]),
        "residual.losses": _loss_rows(residual["runs"]),
    }


def _loss_rows(runs: list[Json]) -> Rows:
    runs_by_name: dict[str, list[Json]] = defaultdict(list)
    for run in runs:
        runs_by_name[run["name"]].append(run)
    return [
        row(
            name,
            len(seeds),
            _spread([run["validation_loss"] for run in seeds]),
            _spread([run["train_loss"] for run in seeds]),
        )
        for name, seeds in runs_by_name.items()
    ]


def _spread(losses: list[float]) -> str:
    mean = statistics.fmean(losses)
    return f"{mean:.4f} ({min(losses):.4f} to {max(losses):.4f})"


def _decisions(recorded: RecordedFigures) -> Figures:
    benchmarks = recorded.benchmarks
    cases = benchmarks["probe"]["cases"].values()
    gains = [choice["gain"] for choice in benchmarks["network"]["chosen"]]
    packing = benchmarks["feed"]["packing_efficiency"]
    return {
        "probe.cases": str(len(cases)),
        "probe.exact_cases": str(sum(case["ours"]["exact"] for case in cases)),
        "network.least_gain": f"{min(gains):.2f}",
        "network.largest_gain": times(max(gains), 2),
        "feed.packing_efficiency": format_share(packing["all"]),
        "feed.padding_efficiency": format_share(packing["padded"]),
        "tune.overhead": format_share(benchmarks["tune"]["overhead"]["share"]),
        "demo.over_untuned": speedup(recorded.demo_profile, "untuned"),
    }
