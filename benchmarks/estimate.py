"""``python -m benchmarks.estimate``: time and accuracy of a memory prediction.

The number of trials that it saves is counted as well.

* speed: the memory model of BERT-base (sequences of 512, fp32, dropout 0.1 on both
  sides, AdamW, two steps) from traces of three micro-batches. The reference is torch's
  ``MemTracker`` under ``FakeTensorMode`` on transformers' model, run at the same three;
  one process, imports and first calls excluded, interleaved, medians. It runs on the
  device "cpu", as fake CUDA tensors fail in backward if torch has no CUDA; ours
  predicts for CUDA.
* cold: seconds of the whole process ``autotune estimate``, for one model and for two;
  the larger median counts.
* accuracy: the predicted peak against the CPU allocator's peak in real steps, for the
  worst configuration.
* simulated: trials until the largest micro-batch is verified, on machines drawn from a
  seed, today's date by default. The bars apply to the first 300, and a wrong answer
  anywhere counts; two times 300 more are shown, as the largest number of trials on one
  machine is a matter of luck.
* fork: from the request of a trial that does nothing to its outcome, against a new
  interpreter that imports the same.
"""

import datetime
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from autotune.base.tables import text_table
from autotune.memory.decide.memory_model import MemoryModel, peak_bytes
from autotune.memory.decide.overheads import MemoryOverheads
from autotune.memory.estimate import FIRST_SIZES, estimate_model
from autotune.subjects.mlm.memory.contents import DOCUMENTS_PER_PACKED_SEQUENCE
from autotune.subjects.mlm.memory.trace_request import TraceRequest
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.outcomes import Measured, Outcome
from autotune.trials.values import Trial
from benchmarks.bars import Bar, Direction, bars_of, finish, measuring, parser, run
from testbed.fakes import FakeMachine
from testbed.programs import CannotMeasure, run_program
from testbed.simulators.memory import MACHINES, SimulatedMachine, search
from trainer.formats.manifest import SpecialIds
from trainer.formats.presets import model_settings
from trainer.formats.train_config import TrainConfig

BARS: dict[str, tuple[str, Direction, float]] = {
    "estimate_law_against_memtracker_ratio": ("ratio", ">=", 10),
    "estimate_cold_s": ("s", "<=", 15),
    "estimate_peak_error_share": ("share", "<=", 0.02),
    "simulated_trials_median": ("count", "<=", 4),
    "simulated_trials_max": ("count", "<=", 10),
    "simulated_wrong_count": ("count", "<=", 0),
    "trial_start_ratio": ("ratio", ">=", 20),
}

SPEED_REPEATS, COLD_REPEATS, FORKED_TRIALS, FRESH_INTERPRETERS, SEEDS = 3, 3, 10, 3, 3
TIMEOUT_S = 600.0
VOCAB_SIZE, ROW_TOKENS, MASKING_PROBABILITY = 30_522, 512, 0.15
SPECIAL_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
UNLIMITED_BYTES = 2**60
COLD_MODELS = (("bert-120m",), ("bert-120m", "bert-350m"))
_FRESH = """\
import pathlib, sys
from autotune.trials.jobs.run_job import run_job
from autotune.trials.jobs.preload import preload_trainer
preload_trainer()
result = pathlib.Path(sys.argv[1])
sys.exit(0 if run_job("testbed.failing_job", result, {"fault": "none"}, {}) else 1)
"""

Figures = dict[str, Any]


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print, write, and return the exit code."""
    options_of = parser("estimate", "Predictions of memory.")
    options_of.add_argument(
        "--only",
        metavar="PARTS",
        help=f"some of {','.join(PARTS)}",
        default=",".join(PARTS),
    )
    options_of.add_argument(
        "--seed",
        type=int,
        help="of the simulated machines; default: the date as a number",
    )
    options = options_of.parse_args(arguments)
    wanted = set(options.only.split(","))
    if unknown := wanted - set(PARTS):
        options_of.error(f"no such part: {', '.join(sorted(unknown))}")
    seed = (
        int(datetime.date.today().strftime("%Y%m%d"))
        if options.seed is None
        else options.seed
    )
    measured: dict[str, Figures] = {}
    for name, part in PARTS.items():
        if name in wanted:
            sys.stderr.write(f"{name}\n")
            measured[name] = part(seed)
    bars = make_bars(measured)
    return finish(
        options.json,
        bars,
        {"parts": measured},
        "\n".join(TABLES[name](figures) for name, figures in measured.items()),
    )


def make_bars(measured: dict[str, Figures]) -> list[Bar]:
    """Return the bars of the parts that were measured."""
    figures: dict[str, float | None] = {}
    if "speed" in measured:
        ratio = median(measured["speed"]["mem_tracker_s"]) / median(
            measured["speed"]["law_s"]
        )
        figures["estimate_law_against_memtracker_ratio"] = ratio
    if "cold" in measured:
        figures["estimate_cold_s"] = max(
            map(median, measured["cold"]["runs_s"].values())
        )
    if "accuracy" in measured:
        errors = [
            abs(case["predicted_bytes"] / case["real_bytes"] - 1)
            for case in measured["accuracy"].values()
        ]
        figures["estimate_peak_error_share"] = max(errors)
    if "simulated" in measured:
        runs = [run for run in measured["simulated"]["runs"] if run["predicted"]]
        figures["simulated_trials_median"] = runs[0]["trials_median"]
        figures["simulated_trials_max"] = runs[0]["trials_max"]
        figures["simulated_wrong_count"] = max(run["wrong"] for run in runs)
    if "fork" in measured:
        figures["trial_start_ratio"] = median(measured["fork"]["fresh_s"]) / median(
            measured["fork"]["forked_s"]
        )
    return bars_of(BARS, figures)


def speed(_: int) -> Figures:
    """Time our memory model, and the runs of the reference at the same sizes."""
    from testbed.simulators.allocator import fake_peak_bytes

    shape = model_settings("bert-120m")
    small = shape.model_copy(update={"config": shape.config | {"num_hidden_layers": 1}})
    times_s: dict[str, list[float]] = {"law_s": [], "mem_tracker_s": []}
    rows = FIRST_SIZES
    for repeat in range(-1, SPEED_REPEATS):
        # What is imported or made ready with the first call is nobody's.
        model = small if repeat < 0 else shape
        config = TrainConfig(
            model=model, layout="packed", device="cuda", seq_length_tokens=ROW_TOKENS
        )
        sizes = rows[:1] if repeat < 0 else rows
        started_s = time.perf_counter()
        fit_memory_model(config, VOCAB_SIZE, DOCUMENTS_PER_PACKED_SEQUENCE)
        traced_s = time.perf_counter()
        for micro_batch_size in sizes:
            fake_peak_bytes(model, VOCAB_SIZE, micro_batch_size, ROW_TOKENS)
        ended_s = time.perf_counter()
        if repeat >= 0:
            times_s["law_s"].append(traced_s - started_s)
            times_s["mem_tracker_s"].append(ended_s - traced_s)
            sys.stderr.write(
                f"repeat {repeat + 1}: {traced_s - started_s:.2f} s,"
                f" {ended_s - traced_s:.1f} s\n"
            )
    return times_s | {"rows": list(rows)}


def fit_memory_model(
    config: TrainConfig,
    vocab_size: int,
    documents_per_sequence: float,
    micro_batches: int = 1,
    rows: int | None = None,
) -> MemoryModel:
    """Return the prediction of ``autotune estimate``, computed in this process.

    With ``rows``, it is the prediction if they are the largest micro-batch.
    """
    from autotune.subjects.mlm.jobs import trace

    def run(trial: Trial) -> Outcome:
        return Measured(figures=trace.run(dict(trial.measured), {}))

    request = TraceRequest(
        config=config,
        vocab_size=vocab_size,
        special_ids=SPECIAL_IDS,
        documents_per_sequence=documents_per_sequence,
        micro_batches=micro_batches,
        ranks=1,
    )
    cpu = MemoryOverheads(kind="cpu")
    return estimate_model(
        request,
        FakeMachine(run),
        UNLIMITED_BYTES,
        cpu,
        max_micro_batch_size=rows or FIRST_SIZES[-1],
    ).memory_model


def cold(_: int) -> Figures:
    """Time the whole command, in a new process."""
    runs_s: dict[str, list[float]] = {}
    for models in COLD_MODELS * COLD_REPEATS:
        named = [word for model in models for word in ("--model", model)]
        command = [
            sys.executable,
            "-m",
            "autotune",
            "estimate",
            *named,
            "--gpu",
            "h100-nvl-94gb",
        ]
        runs_s.setdefault(" and ".join(models), []).append(_seconds(command))
    return {"runs_s": runs_s}


def accuracy(_: int) -> Figures:
    """Peaks by the law and by the allocator, of every configuration."""
    from testbed.simulators.allocator import CASES, allocator_peak_bytes

    peaks = {}
    for case in CASES:
        fit = fit_memory_model(
            case.config,
            case.vocab_size,
            case.documents_per_sequence,
            case.micro_batches,
            case.rows,
        )
        predicted = peak_bytes(fit, case.rows, MemoryOverheads(kind="cpu"))
        peaks[case.name] = {
            "predicted_bytes": predicted,
            "real_bytes": allocator_peak_bytes(case),
        }
        sys.stderr.write(
            f"{case.name}: {predicted / peaks[case.name]['real_bytes'] - 1:+.3%}\n"
        )
    return peaks


def simulated(seed: int) -> Figures:
    """Count trials of searches on simulated machines.

    They have a prediction. Searches without one are counted for information.
    """
    runs = []
    for number in range(SEEDS):
        base = seed * 1000 + number * MACHINES
        for predicted in (True, False):
            searches = [
                search(SimulatedMachine(base + machine), predicted=predicted)
                for machine in range(MACHINES)
            ]
            trials = [count for count, _ in searches]
            runs.append(
                {
                    "base_seed": base,
                    "predicted": predicted,
                    "trials_median": median(trials),
                    "trials_max": max(trials),
                    "wrong": sum(not right for _, right in searches),
                    "machines_by_trials": {
                        str(count): machines
                        for count, machines in sorted(Counter(trials).items())
                    },
                }
            )
    return {"seed": seed, "machines": MACHINES, "runs": runs}


def fork(_: int) -> Figures:
    """Time a trial that does nothing, after the first.

    A new interpreter that does the same is timed as well.
    """
    forked_s, fresh_s = [], []
    job: Any = "testbed.failing_job"
    nothing = Trial(job=job, measured={"fault": "none"}, timeout_s=TIMEOUT_S)
    with (
        ForkServerMachine() as machine,
        tempfile.TemporaryDirectory(prefix="fork-") as place,
    ):
        for _number in range(1 + FORKED_TRIALS):
            started_s = time.perf_counter()
            outcome = machine.run(nothing)
            forked_s.append(time.perf_counter() - started_s)
            if not isinstance(outcome, Measured):
                raise CannotMeasure(f"a trial that does nothing ended so: {outcome}")
        for _number in range(FRESH_INTERPRETERS):
            fresh_s.append(
                _seconds(
                    [sys.executable, "-c", _FRESH, str(Path(place) / "result.json")]
                )
            )
    return {
        "forked_s": forked_s[1:],
        "fresh_s": fresh_s,
        "server_and_first_trial_s": forked_s[0],
    }


PARTS: dict[str, Callable[[int], Figures]] = {
    part.__name__: part for part in (speed, cold, accuracy, simulated, fork)
}


def _seconds(command: Sequence[str]) -> float:
    started_s = time.perf_counter()
    run_program(command, timeout_s=TIMEOUT_S)
    return time.perf_counter() - started_s


def _runs(title: str, runs_s: dict[str, list[float]]) -> str:
    rows = [
        [name, f"{median(runs):.3f} s", f"{min(runs):.3f} to {max(runs):.3f} s"]
        for name, runs in runs_s.items()
    ]
    return text_table([title, "median", "range"], rows) + "\n"


def _accuracy(figures: Figures) -> str:
    rows = [
        [
            name,
            f"{peaks['real_bytes'] / 2**20:.1f} MiB",
            f"{peaks['predicted_bytes'] / peaks['real_bytes'] - 1:+.3%}",
        ]
        for name, peaks in figures.items()
    ]
    return text_table(["step on a CPU", "real peak", "predicted"], rows) + "\n"


def _simulated(figures: Figures) -> str:
    keys = ("base_seed", "predicted", "trials_median", "trials_max", "wrong")
    titles = [
        f"{figures['machines']} machines from seed",
        "prediction",
        "median trials",
        "most",
        "wrong",
    ]
    return (
        text_table(titles, [[str(run[key]) for key in keys] for run in figures["runs"]])
        + "\n"
    )


TABLES: dict[str, Callable[[Figures], str]] = {
    "speed": lambda figures: _runs(
        "law of BERT-base",
        {"our traces": figures["law_s"], "MemTracker": figures["mem_tracker_s"]},
    ),
    "cold": lambda figures: _runs("autotune estimate", figures["runs_s"]),
    "accuracy": _accuracy,
    "simulated": _simulated,
    "fork": lambda figures: _runs(
        "a trial that does nothing",
        {"forked": figures["forked_s"], "new interpreter": figures["fresh_s"]},
    ),
}


if __name__ == "__main__":
    run(main)
