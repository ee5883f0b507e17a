"""Figures of the paper's case, and of injected faults."""

from autotune.base.units import format_count, format_percent
from benchmarks.page_figures.formats import Figures, Rows, difference, row, seconds
from benchmarks.page_figures.recorded import Json, RecordedFigures


def figures(recorded: RecordedFigures) -> Figures:
    """Return the figures of the paper's case, and of injected faults."""
    return {**_paper(recorded.benchmarks), **_faults(recorded.faults)}


def _paper(benchmarks: Json) -> Figures:
    paper = benchmarks["paper_case"]
    theirs, tuned = paper["cases"]["as the paper's trainer"], paper["cases"]["tuned"]
    their_setting, bf16, *_ = paper["scaling"]
    programs, licences = benchmarks["advice"]["sizes"]
    # Two bytes an id, and eight of offset a sample.
    bytes_per_sample = 2 * paper["functions"]["mean_tokens_cut"] + 8
    return {
        "paper.tokenised_programs": difference(programs["delivered"]),
        "paper.tokenised_licences": difference(licences["delivered"]),
        "paper.efficiency": format_percent(their_setting["efficiency"][-1]),
        "paper.efficiency_bf16": format_percent(bf16["efficiency"][-1]),
        "paper.size_120m": _size_with_range(theirs["bert-120m"]),
        "paper.size_350m": _size_with_range(theirs["bert-350m"]),
        "paper.tuned_size_120m": _size_with_range(tuned["bert-120m"]),
        "paper.tuned_size_350m": _size_with_range(tuned["bert-350m"]),
        "paper.bytes_per_sample": f"{bytes_per_sample:.0f}",
    }


def _size_with_range(estimate: Json) -> str:
    size, low, high = (
        format_count(estimate[key])
        for key in ("micro_batch_size", "micro_batch_size_low", "micro_batch_size_high")
    )
    return f"{size} ({low} to {high})"


def _faults(faults: Json) -> Figures:
    killed = {
        name: loop
        for name, loop in faults.items()
        if isinstance(loop, dict) and "kills" in loop
    }
    tuning, training = faults["tuning"], faults["training"]
    return {
        "faults.data.count": str(sum(loop["kills"] for loop in killed.values())),
        "faults.tuning.count": str(sum(loop["faults"] for loop in tuning.values())),
        "faults.training.count": str(sum(loop["faults"] for loop in training.values())),
        "faults.files.count": format_count(faults["mutated files"]["cases"]),
        "faults.files.tracebacks": str(faults["mutated files"]["tracebacks"]),
        "faults.data": [
            row(
                name,
                loop["kills"],
                loop["datasets"] if "datasets" in loop else loop["copies"],
                loop["byte_identical"],
                seconds(loop["seconds"], 0),
            )
            for name, loop in killed.items()
        ],
        "faults.tuning": _loop_rows(tuning),
        "faults.training": _loop_rows(training),
    }


def _loop_rows(loops: Json) -> Rows:
    return [
        row(
            name,
            loop["injected"],
            loop["faults"],
            loop["runs"] or "n/a",
            loop["held"],
            seconds(loop["seconds"], 0),
        )
        for name, loop in loops.items()
    ]
