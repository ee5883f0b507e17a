"""``python -m benchmarks.workers``: the choice of ``num_workers``, and its cost.

The choice is right if it is the smallest sufficient number.

Simulated: 1,000 trainings with realistic noise and faults, of which the answer is known
(``testbed.simulators.loader``). Compared: our rule with the data-wait figures, our rule
by throughput alone, and the rule of loadtune (PyPI, 0.3.0). From a window without
workers, loadtune stays there, tries two workers, or tries a ladder of counts, and takes
the fewest workers within 2 % of the best. It gets one window for each count, which is
its default, and as many as ours took. An exhaustive sweep measures cached batches and
every count as often as ours measured the one that it chose. Trainings in which some
count's true ratio lies within half a per cent of 98 % count either way.

Real: datasets on this machine that sleep a known time for every sample, whose answers
follow by arithmetic, and the same tokenised dataset as it is, under a real training
step.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autotune.base.clock import SystemClock
from autotune.base.tables import text_table
from autotune.machine.host import SystemHost
from autotune.machine.values import HostFacts
from autotune.subjects.mlm.subject import MlmSubject
from autotune.subjects.mlm.workers.windows import windows_of_trainer
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_log import TrialLog
from autotune.workers.decide.count_statistics import Count, CountWindow, Round
from autotune.workers.decide.count_verdicts import ENOUGH_SHARE
from autotune.workers.decide.loader_limits import LoaderLimits
from autotune.workers.decide.worker_count import WorkersRule
from autotune.workers.measure import WorkerSweep
from benchmarks.bars import Bar, Direction, bars_of, finish, measuring, parser, run
from testbed.corpora import real_lengths, write_corpus
from testbed.simulators.loader import SimulatedFeed
from trainer.formats.manifest import read_manifest
from trainer.formats.presets import model_settings
from trainer.formats.train_config import DataSettings, ModelSettings, TrainConfig

TRAININGS = 1000
MOST_WINDOWS = 2000
"""Of one simulated sweep; then it is undecided."""
DEFAULT_WINDOWS = 150
"""About what the command's ten minutes hold."""
ALONE_PART = 5
BY_THROUGHPUT = f"ours, by throughput alone (one in {ALONE_PART})"
BORDER = 0.005
BARS: dict[str, tuple[str, Direction, float]] = {
    "workers_simulated_within_2_percent_share": ("share", ">=", 0.97),
    "workers_simulated_right_share": ("share", ">=", 0.92),
    "workers_simulated_undecided_share": ("share", "<=", 0.05),
    "workers_windows_of_exhaustive_share": ("share", "<=", 0.50),
    "workers_simulated_right_against_loadtune_ratio": ("share", ">=", 1.0),
}

ROWS, ROW_TOKENS, SAMPLES = 16, 128, 6000
STEP_S = 0.06
SLEEPS = {2: 1.6, 3: 2.7, 6: 5.5}
"""By the answer: how many steps one worker sleeps for a batch. One worker fewer gives
63 %, 74 % and 91 %."""
MAX_WORKERS = 8
TOKENISED_ANSWERS = (0, 1)
REAL_BUDGET_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Decision of a rule on one training."""

    seed: int
    noise: float
    borderline: bool
    true: int
    chosen: int
    undecided_between: tuple[int, ...]
    within: bool
    """Whether the chosen count's true throughput is within 2 % of the best."""
    windows: int
    exhaustive_windows: int

    @property
    def right(self) -> bool:
        """Whether the choice is the smallest sufficient count.

        An undecided result that contains it is right as well.
        """
        if self.undecided_between:
            low, high = self.undecided_between
            return low <= self.true <= high
        return self.chosen == self.true


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print and return the exit code."""
    options_of = parser("workers", (__doc__ or "").splitlines()[0])
    options_of.add_argument(
        "--trainings", type=int, default=TRAININGS, help="simulated trainings"
    )
    options_of.add_argument(
        "--first-seed", type=int, default=0, help="of the simulated trainings"
    )
    options_of.add_argument("--processes", type=int, default=2)
    options_of.add_argument(
        "--no-real", action="store_true", help="leave the real datasets out"
    )
    options = options_of.parse_args(arguments)
    seeds = range(options.first_seed, options.first_seed + options.trainings)
    simulated = simulate(seeds, options.processes)
    real = {} if options.no_real else measure_real()
    bars = make_bars(simulated, real, with_real=not options.no_real)
    content = {
        "simulated": {name: summary(verdicts) for name, verdicts in simulated.items()},
        "real": real,
    }
    wrong = [
        verdict
        for verdict in simulated["ours"]
        if not (verdict.right or verdict.borderline)
    ]
    notes = [f"wrong: {verdict}" for verdict in wrong]
    notes += [
        f"{name}: {case['chosen']} (expected {case['expected']}), {case['windows']}"
        f" windows, {case['choice']}"
        for name, case in real.items()
    ]
    return finish(options.json, bars, content, "\n".join([_table(simulated), *notes]))


# Simulated.


def simulate(seeds: Sequence[int], processes: int) -> dict[str, list[Verdict]]:
    """Apply every rule to every training."""
    with ProcessPoolExecutor(processes) as pool:
        ours = list(pool.map(sweep, seeds, chunksize=10))
        sys.stderr.write("simulated: ours\n")
        short = list(
            pool.map(partial(sweep, most_windows=DEFAULT_WINDOWS), seeds, chunksize=10)
        )
        part = seeds[: max(1, len(seeds) // ALONE_PART)]
        alone = list(pool.map(partial(sweep, by_wait=False), part, chunksize=10))
        sys.stderr.write("simulated: by throughput alone\n")
    once = [ladder_rule(seed, 1) for seed in seeds]
    # As many windows as ours, spread over the counts that it tries.
    often = [
        ladder_rule(verdict.seed, max(1, round(verdict.windows / LADDER_COUNTS)))
        for verdict in ours
    ]
    return {
        "ours": ours,
        f"ours, at most {DEFAULT_WINDOWS} windows": short,
        BY_THROUGHPUT: alone,
        "loadtune": once,
        "loadtune, as many windows": often,
    }


def sweep(
    seed: int, *, by_wait: bool = True, most_windows: int = MOST_WINDOWS
) -> Verdict:
    """Apply our rule to one training.

    Without ``by_wait``, every window shows that it waits for data all of the time.
    """
    feed = SimulatedFeed(seed)
    rounds: list[Round] = []
    while feed.windows < most_windows:
        todo = WorkersRule(rounds, feed.max_workers).next_rounds()
        if todo is None:
            break
        for _ in range(todo.rounds):
            windows = _round(
                feed, todo.counts if len(rounds) % 2 == 0 else todo.counts[::-1]
            )
            waiting = {
                count: window._replace(data_wait_share=1.0)
                for count, window in windows.items()
            }
            rounds.append(windows if by_wait else waiting)
    choice = WorkersRule(rounds, feed.max_workers).choose()
    repeats = sum(choice.workers in windows for windows in rounds)
    return _verdict(
        seed,
        feed,
        choice.workers,
        choice.undecided_between,
        (feed.max_workers + 2) * repeats,
    )


LADDER_COUNTS = 6
INPUT_BOUND, HEALTHY, TOLERANCE = 0.20, 0.05, 0.02


def ladder_rule(seed: int, repeats: int) -> Verdict:
    """Apply the rule of loadtune, for a machine with a CPU for each worker."""
    feed = SimulatedFeed(seed)
    cpus = feed.max_workers

    def median(count: int) -> tuple[float, float]:
        readings = [feed.read(count) for _ in range(repeats)]
        ordered = sorted(readings, key=lambda reading: reading.tokens_per_s)
        middle = ordered[len(ordered) // 2]
        return middle.tokens_per_s, middle.data_wait_share

    rates = {}
    rates[0], wait = median(0)
    if wait >= INPUT_BOUND:
        counts = {1, 2, 4} | ({cpus // 2, cpus - 2} if cpus >= 8 else set())
    else:
        counts = set() if wait <= HEALTHY else {2}
    rates |= {count: median(count)[0] for count in sorted(counts) if count <= cpus}
    chosen = min(
        count
        for count, rate in rates.items()
        if rate >= (1 - TOLERANCE) * max(rates.values())
    )
    return _verdict(seed, feed, chosen, (), 0)


def _round(feed: SimulatedFeed, counts: Sequence[Count]) -> Round:
    windows = {}
    for count in counts:
        reading = feed.read(count)
        windows[count] = CountWindow(
            units_per_s=reading.tokens_per_s, data_wait_share=reading.data_wait_share
        )
    return windows


def _verdict(
    seed: int,
    feed: SimulatedFeed,
    chosen: int,
    undecided: tuple[int, ...],
    exhaustive: int,
) -> Verdict:
    return Verdict(
        seed=seed,
        noise=feed.noise,
        borderline=feed.is_borderline(ENOUGH_SHARE, BORDER),
        true=feed.true_count(ENOUGH_SHARE),
        chosen=chosen,
        undecided_between=undecided,
        within=feed.true_tokens_per_s(chosen) >= ENOUGH_SHARE * feed.best_tokens_per_s,
        windows=feed.windows,
        exhaustive_windows=exhaustive,
    )


def summary(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return shares of all trainings, and windows."""
    total = len(verdicts)
    exhaustive = sum(verdict.exhaustive_windows for verdict in verdicts)
    return {
        "within_share": sum(
            verdict.within or verdict.borderline for verdict in verdicts
        )
        / total,
        "right_share": sum(verdict.right or verdict.borderline for verdict in verdicts)
        / total,
        "undecided_share": (
            sum(
                bool(verdict.undecided_between) and not verdict.borderline
                for verdict in verdicts
            )
            / total
        ),
        "undecided_share_with_borderline": (
            sum(bool(verdict.undecided_between) for verdict in verdicts) / total
        ),
        "borderline_share": sum(verdict.borderline for verdict in verdicts) / total,
        "right_share_without_borderline": (
            sum(verdict.right for verdict in verdicts if not verdict.borderline)
            / max(1, sum(not verdict.borderline for verdict in verdicts))
        ),
        "windows_median": statistics.median(verdict.windows for verdict in verdicts),
        "windows_mean": statistics.fmean(verdict.windows for verdict in verdicts),
        "windows_of_exhaustive_share": (
            sum(verdict.windows for verdict in verdicts) / exhaustive
            if exhaustive
            else 0.0
        ),
    }


# Real.


def measure_real() -> dict[str, dict[str, Any]]:
    """Sleeping datasets, and the tokenised one, on this machine."""
    results = {}
    with (
        tempfile.TemporaryDirectory(prefix="workers-") as place,
        ForkServerMachine() as machine,
    ):
        data = write_corpus(Path(place) / "data", real_lengths(SAMPLES, seed=0))
        host = SystemHost().facts([data])
        manifest = read_manifest(data)
        tiny = ModelSettings(name="unused", config={"model_type": "bert"})
        cases: list[tuple[str, list[int], ModelSettings, float | None, float]] = [
            (
                f"sleeping {steps:g} steps a batch",
                [answer],
                tiny,
                STEP_S,
                steps * STEP_S / ROWS,
            )
            for answer, steps in SLEEPS.items()
        ]
        cases.append(
            (
                "tokenised dataset",
                list(TOKENISED_ANSWERS),
                model_settings("bert-mini"),
                None,
                0.0,
            )
        )
        for name, expected, model, step_s, delay_s in cases:
            config = TrainConfig(
                model=model,
                data=DataSettings(dataset_hash=manifest.dataset_hash),
                seq_length_tokens=ROW_TOKENS,
                micro_batch_size=ROWS,
            )
            request = SweepRequest(
                data=data,
                reports=data,
                budget_s=REAL_BUDGET_S,
                window_s=1.0,
                trial_timeout_s=120.0,
                replayed_step_s=step_s,
                sample_delay_s=delay_s,
            )
            limits = _limits(host, MAX_WORKERS if delay_s else None)
            trial_log = TrialLog(Path(place) / "trials", name.replace(" ", "-"))
            runner = TrialRunner(
                machine=machine, trial_log=trial_log, site=name, clock=SystemClock()
            )
            subject = MlmSubject(
                config=config,
                vocab_size=manifest.vocab_size,
                special_ids=manifest.special_ids,
            )
            windows = windows_of_trainer(subject, request, limits)
            swept = WorkerSweep(windows=windows, runner=runner)
            choice = swept.run()
            results[name] = {
                "expected": expected,
                "chosen": choice.workers,
                "undecided_between": list(choice.undecided_between),
                "choice": choice.proof,
                "next_smaller": choice.next_smaller,
                "windows": swept.measurement.windows,
                "seconds": swept.measurement.seconds,
                "ratios": {
                    str(count): ratio.value for count, ratio in choice.ratios.items()
                },
            }
            sys.stderr.write(f"real: {name}: {choice.workers}\n")
    return results


def _limits(host: HostFacts, requested_workers: int | None) -> LoaderLimits:
    return LoaderLimits(
        host=host,
        local_ranks=1,
        batch_bytes=ROWS * ROW_TOKENS * 4,
        prefetch_factor=2,
        requested_workers=requested_workers,
    )


# What comes out.


def make_bars(
    simulated: dict[str, list[Verdict]], real: dict[str, Any], *, with_real: bool
) -> list[Bar]:
    """Return the bars; the rival's is the better one of its figures."""
    ours = summary(simulated["ours"])
    rival = max(
        summary(verdicts)["right_share"]
        for name, verdicts in simulated.items()
        if name.startswith("loadtune")
    )
    ratio = ours["right_share"] / rival if rival else None
    figures = (
        *(ours[name] for name in ("within_share", "right_share", "undecided_share")),
        ours["windows_of_exhaustive_share"],
        ratio,
    )
    bars = bars_of(BARS, dict(zip(BARS, figures, strict=True)))
    if with_real:
        right = sum(
            case["chosen"] in case["expected"] and not case["undecided_between"]
            for case in real.values()
        )
        name = "workers_real_right_datasets"
        bars.append(
            Bar(name=name, figure=right, unit="datasets", bar=len(real), direction=">=")
        )
    return bars


def _table(simulated: dict[str, list[Verdict]]) -> str:
    headers = [
        "rule",
        "within 2 %",
        "right",
        "right, clear ones",
        "undecided",
        "windows (median)",
        "(mean)",
    ]
    rows = []
    for name, verdicts in simulated.items():
        figures = summary(verdicts)
        shares = (
            "within_share",
            "right_share",
            "right_share_without_borderline",
            "undecided_share",
        )
        rows.append([name, *(f"{figures[share]:.1%}" for share in shares)])
        rows[-1] += [
            f"{figures['windows_median']:.0f}",
            f"{figures['windows_mean']:.0f}",
        ]
    return text_table(headers, rows, align="lrrrrrr")


if __name__ == "__main__":
    run(main)
