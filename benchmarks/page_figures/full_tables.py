"""The tables of ``docs/reference/figures.md``, in the order of that page."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.base.units import (
    format_bytes,
    format_count,
    format_percent,
    format_share,
)
from benchmarks.page_figures.formats import Figures, Rows, difference, row, seconds
from benchmarks.page_figures.recorded import Json, RecordedFigures


def figures(recorded: RecordedFigures) -> Figures:
    """Return the tables of the page with all figures."""
    benchmarks = recorded.benchmarks
    return {
        "train.trainers": _trainer_rows(benchmarks["train"]["settings"]),
        "feed.pipelines": _pipeline_rows(benchmarks["feed"]["rates"]),
        "scale.opening": _opening_rows(benchmarks["scale"]["figures"]),
        "allocator.peaks": _allocator_rows(benchmarks["cuda_memory"]["configurations"]),
        "estimate.peaks": _estimate_rows(benchmarks["estimate"]["parts"]["accuracy"]),
        "own_code.finders": _own_code_rows(benchmarks["own_code"]["subjects"]),
        "probe.finders": _finder_rows(benchmarks["probe"]["cases"]),
        "workers.simulated": _simulated_rows(benchmarks["workers"]["simulated"]),
        "workers.real": _real_worker_rows(benchmarks["workers"]["real"]),
        "network.steps": _network_step_rows(benchmarks["network"]["predicted"]),
        "network.chosen": _network_choice_rows(benchmarks["network"]["chosen"]),
        "network.useful_nodes": [
            row(case["model"], case["cluster"], case["predicted"], case["true"])
            for case in benchmarks["network"]["useful_nodes"]
        ],
        "advice.bottlenecks": [
            row(
                training["what"],
                training["cause"],
                training["judged"],
                format_percent(training["share"]),
            )
            for training in benchmarks["advice"]["limits"]
        ],
        "advice.gains": [
            row(
                advice["rule"],
                f"{advice['promised']:.2f}",
                f"{advice['low']:.2f} to {advice['high']:.2f}",
                f"{advice['delivered']:.2f}",
            )
            for advice in [
                *benchmarks["advice"]["followed"],
                *benchmarks["advice"]["sizes"],
            ]
        ],
        "tune.searches": _search_rows(benchmarks["tune"]),
        "checkpoint.stall": _stall_rows(benchmarks["checkpoint"]["stall"]["block_s"]),
    }


def _trainer_rows(settings: Json) -> Rows:
    rows = []
    for setting, measured in settings.items():
        losses = measured["validation_loss"]
        ours = statistics.median(measured["tokens_per_s"]["ours"])
        for trainer, repeats in measured["tokens_per_s"].items():
            rate = statistics.median(repeats)
            loss = f"{losses[trainer]:.3f}" if trainer in losses else ""
            speedup = f"{ours / rate:.2f}"
            rows.append(row(f"{trainer}; {setting}", format_count(rate), speedup, loss))
    return rows


def _pipeline_rows(rates: Json) -> Rows:
    return [
        row(
            name,
            format_count(statistics.median(rate["samples_per_s"])),
            format_count(statistics.median(rate["tokens_per_s"])),
        )
        for name, rate in rates.items()
    ]


def _opening_rows(scale: Json) -> Rows:
    rows = []
    for name, samples in scale["samples"].items():
        runs = scale["runs"][name]
        open_s = statistics.median(run["open_s"] for run in runs)
        first_batch_s = statistics.median(run["first_batch_s"] for run in runs)
        cells = row(
            format_count(samples),
            seconds(open_s, 3),
            seconds(first_batch_s, 3),
            format_bytes(runs[-1]["rss_growth_bytes"]),
        )
        rows.append(cells)
    return rows


def _allocator_rows(configurations: Json) -> Rows:
    rows = []
    for name, search in configurations.items():
        if "predicted_peak_bytes" not in search:
            continue
        peak_bytes = search["allocator_peak_bytes"]
        retries = search["trained"]["retries"] if "trained" in search else ""
        cells = row(
            name,
            search["predicted_rows"],
            search["largest_micro_batch_size"],
            f"{peak_bytes / 1e9:.2f} GB",
            difference(search["predicted_peak_bytes"] / peak_bytes, 3),
            len(search["trials"]),
            retries,
        )
        rows.append(cells)
    return rows


def _estimate_rows(configurations: Json) -> Rows:
    return [
        row(
            name,
            format_bytes(peak["predicted_bytes"]),
            format_bytes(peak["real_bytes"]),
            difference(peak["predicted_bytes"] / peak["real_bytes"], 3),
        )
        for name, peak in configurations.items()
    ]


def _own_code_rows(subjects: Mapping[str, Json]) -> Rows:
    rows = []
    for subject, answers in subjects.items():
        for tool, answer in answers.items():
            cells = row(
                subject,
                tool,
                answer["size"] or "none",
                "exact" if answer["exact"] else "not exact",
                answer["trials"],
                seconds(answer["seconds"], 1),
            )
            rows.append(cells)
    return rows


def _finder_rows(cases: Mapping[str, Json]) -> Rows:
    rows = []
    for case, answers in cases.items():
        finders = {"ours": answers["ours"], **answers["rivals"]}
        for finder, answer in finders.items():
            cells = row(
                case.replace("recomputed", "checkpointing"),
                finder.replace("_", " "),
                answer["rows"] or "none",
                answer["trials"],
                answer["refused"],
                seconds(answer["seconds"], 1),
            )
            rows.append(cells)
    return rows


def _simulated_rows(rules: Json) -> Rows:
    return [
        row(
            name,
            format_share(rule["within_share"]),
            format_share(rule["right_share"]),
            format_share(rule["right_share_without_borderline"]),
            format_share(rule["undecided_share"]),
            f"{rule['windows_median']:.0f}",
        )
        for name, rule in rules.items()
    ]


def _real_worker_rows(datasets: Json) -> Rows:
    return [
        row(
            name,
            " or ".join(map(str, sweep["expected"])),
            sweep["chosen"],
            sweep["windows"],
        )
        for name, sweep in datasets.items()
    ]


def _network_step_rows(steps: Iterable[Json]) -> Rows:
    return [
        row(
            step["hosts"],
            f"{format_count(step['bits_per_s'] / 1e6)} Mbit/s",
            step["exchange"],
            step["micro_batches"],
            seconds(step["without_s"], 3),
            seconds(step["predicted_s"], 3),
            seconds(step["measured_s"], 3),
            difference(step["predicted_s"] / step["measured_s"], 1),
        )
        for step in steps
    ]


def _network_choice_rows(choices: Iterable[Json]) -> Rows:
    rows = []
    for choice in choices:
        gain = choice["gain"]
        cells = row(
            choice["hosts"],
            choice["tokens_per_rank_and_step"],
            seconds(choice["default_s"], 3),
            choice["chosen"],
            seconds(choice["chosen_s"], 3),
            "nothing proven" if gain is None else f"{gain:.2f}",
        )
        rows.append(cells)
    return rows


def _search_rows(tune: Json) -> Rows:
    rows = []
    for name, grid in tune["grids"].items():
        searches: list[Mapping[str, Any]] = tune["replays"][name]
        of_best = [search["of_best_share"] for search in searches]
        speedups = [search["to_unexplored"] for search in searches]
        tried = [search["trials_share"] for search in searches]
        cells = row(
            name,
            grid["cells"],
            format_share(grid["window_ratio_sigma"]),
            format_share(grid["unexplored_of_best_share"]),
            format_share(statistics.fmean(of_best)),
            format_share(min(of_best)),
            f"{statistics.median(speedups):.2f}",
            format_share(statistics.fmean(tried)),
        )
        rows.append(cells)
    return rows


def _stall_rows(block_s: Mapping[str, list[float]]) -> Rows:
    rows = []
    for save, times_s in block_s.items():
        pairs = zip(times_s, block_s["none"], strict=True)
        extra_s = statistics.median(with_s - without_s for with_s, without_s in pairs)
        rows.append(
            row(save, seconds(statistics.median(times_s), 2), seconds(extra_s, 2))
        )
    return rows
