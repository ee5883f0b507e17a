"""Check of judgements and advice.

``python -m benchmarks.advice [--json FILE] [--only PART …]``

* ``simulated``: what limits 400 simulated runs and their profiles, known from what each
  remedy saves there, and what advice delivers in simulated trainings.
* ``limits``: real trainings on this machine, each limited by one thing, two of them
  over a slow network (needs root).
* ``followed``: real trainings in which advice is followed; the delivered gain is
  compared with the predicted one.
* ``sizes``: advice that promises storage or memory, followed for real.
"""

import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.advice.decide.bottleneck import bottleneck_of_profile, bottleneck_of_run
from autotune.advice.decide.gpu_counters import counters_of_profile
from autotune.advice.decide.rules import advise
from autotune.advice.read_context import context_of_run
from autotune.evidence.advice import Advice, Bottleneck, Cause, Gain
from autotune.machine.host import SystemHost
from benchmarks.bars import Bar, Direction, bars_of, finish, measuring, parser, run
from testbed.scenarios import Scenario, scenarios
from testbed.simulators import sizes
from testbed.simulators.runs import simulated_run
from testbed.simulators.trainings import (
    CacheDirectory,
    deep,
    make_place,
    train,
    train_over_network,
)
from trainer.formats.run_record import Run

PARTS = ("simulated", "limits", "followed", "sizes")
SIMULATED_RUNS, WORLDS = 400, 8
BARS: dict[str, tuple[str, Direction, float]] = {
    "advice_simulated_causes_right_share": ("share", ">=", 0.97),
    "advice_simulated_causes_right_share_of_profiles": ("share", ">=", 0.97),
    "advice_real_causes_right_count": ("count", ">=", 5),
    "advice_simulated_promises_kept_share": ("share", ">=", 0.95),
    "advice_silent_where_it_should_share": ("share", ">=", 1.0),
    "advice_real_promises_kept_share": ("share", ">=", 0.95),
}
WITHOUT_INTERVAL = 0.1
"""Tolerated relative error of a promise without an interval."""
NOISE_SHARE = 0.05
"""Relative difference of two real trainings on a shared machine, nothing changed."""
ROUNDS = 3

LIMITED: tuple[tuple[str, Cause, Callable[[CacheDirectory], Run]], ...] = (
    (
        "batches from memory",
        "compute",
        lambda place: train(place, "cached", limit="cached=32"),
    ),
    (
        "a dataset that sleeps",
        "data loading",
        lambda place: train(place, "sleeping", limit="delay=0.01"),
    ),
    (
        "two ranks, of which the second's dataset sleeps",
        "data loading",
        lambda place: train(place, "behind", limit="delay=0.01@1", ranks=2),
    ),
    # More layers, as padding costs layers and no head: one head on two layers is half
    # of their work.
    (
        "one sample to a row",
        "padding",
        lambda place: train(place, "padded", layout="padded", model=deep(4)),
    ),
    (
        "two hosts, 200 Mbit/s",
        "network",
        lambda place: train_over_network(
            place, "network", global_batch_size=4, micro_batch_size=2
        ),
    ),
)

FOLLOWED: tuple[tuple[str, dict[str, Any], dict[str, Any], str | None], ...] = (
    ("padding", {"layout": "padded"}, {}, None),
    ("dense-head", {"mlm_head": "dense", "last_layer": "dense"}, {}, None),
    ("dense-last-layer", {"last_layer": "dense"}, {}, None),
    # What `autotune workers` would find: reading sleeps, so workers sleep beside each
    # other.
    ("more-workers", {}, {"data__num_workers": 4}, "delay=0.004"),
)
"""Rule, settings before, what its command would find beside its changes, and the limit
of both runs."""


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print bars, and keep figures.

    The file keeps the parts that are not measured.
    """
    options_of = parser("advice", __doc__ or "")
    options_of.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = options_of.parse_args(arguments)
    results: dict[str, Any] = {}
    if options.json is not None and options.json.is_file():
        results = {
            part: value
            for part, value in json.loads(options.json.read_text()).items()
            if part in PARTS
        }
    with tempfile.TemporaryDirectory() as scratch:
        place = make_place(Path(scratch))
        measures: dict[str, Callable[[], Any]] = {
            "simulated": _simulated,
            "limits": lambda: _limits(place),
            "followed": lambda: [_followed(place, *case) for case in FOLLOWED],
            "sizes": lambda: sizes.followed(Path(scratch)),
        }
        for part in options.only:
            results[part] = measures[part]()
            sys.stderr.write(f"{part}: {json.dumps(results[part])[:400]}\n")
    return finish(options.json, _bars(results), results, _table(results))


def _simulated() -> dict[str, Any]:
    runs = [simulated_run(seed) for seed in range(SIMULATED_RUNS)]
    of_runs = [
        (
            simulated.cause,
            bottleneck_of_run(simulated.run, counters_of_profile(simulated.profile)),
        )
        for simulated in runs
    ]
    of_profiles = [
        (simulated.cause, bottleneck_of_profile(simulated.profile))
        for simulated in runs
        if simulated.in_profile
    ]
    promises = [
        _promise(scenario) for seed in range(WORLDS) for scenario in scenarios(seed)
    ]
    return {
        "runs": SIMULATED_RUNS,
        "right_share": _right_share(of_runs),
        "of_runs": _by_cause(of_runs),
        "profiles": len(of_profiles),
        "profiles_right_share": _right_share(of_profiles),
        "of_profiles": _by_cause(of_profiles),
        "scenarios": len(promises),
        "spoken_share": statistics.fmean(promise["spoken"] for promise in promises),
        "silent_share": statistics.fmean(promise["silent"] for promise in promises),
        "kept_share": statistics.fmean(
            promise["kept"] for promise in promises if promise["kept"] is not None
        ),
        "promises": [
            promise
            | {
                "delivered_in_worlds": [
                    other["delivered"]
                    for other in promises[number :: len(promises) // WORLDS]
                ]
            }
            for number, promise in enumerate(promises[: len(promises) // WORLDS])
            if promise["kept"] is not None
        ],
    }


Judged = Sequence[tuple[Cause, Bottleneck | None]]


def _right_share(judged: Judged) -> float:
    return statistics.fmean(
        bottleneck is not None and bottleneck.limit == cause
        for cause, bottleneck in judged
    )


def _by_cause(judged: Judged) -> dict[str, dict[str, int]]:
    """Count how often each cause was taken for which."""
    limits = [
        (cause, "none" if bottleneck is None else bottleneck.limit)
        for cause, bottleneck in judged
    ]
    return {
        cause: dict(
            Counter(limit for true_cause, limit in limits if true_cause == cause)
        )
        for cause, _ in limits
    }


def _promise(scenario: Scenario) -> dict[str, Any]:
    advice = scenario.spoken()
    gain = None if advice is None else advice.gain
    kept = delivered = None
    if advice is not None and gain is not None and scenario.delivered is not None:
        delivered = scenario.delivered(advice)
        kept = is_kept(gain, delivered, noise=0.02)
    return {
        "rule": scenario.rule,
        "what": scenario.what,
        "spoken": advice is not None,
        "silent": scenario.is_silent(),
        "promised": None if gain is None else gain.ratio,
        "low": None if gain is None else gain.low,
        "high": None if gain is None else gain.high,
        "delivered": delivered,
        "kept": kept,
    }


def is_kept(gain: Gain, delivered: float, *, noise: float) -> bool:
    """Return whether the delivered gain is about what was promised.

    It must lie within the promised interval, or a little beside it. Wide intervals
    promise nothing, so the likeliest gain must be delivered at least by half, and at
    most twice.
    """
    low = gain.ratio * (1 - WITHOUT_INTERVAL) if gain.low is None else gain.low
    high = gain.ratio * (1 + WITHOUT_INTERVAL) if gain.high is None else gain.high
    within = low * (1 - noise) <= delivered <= high * (1 + noise)
    promised, got = gain.ratio - 1, delivered - 1
    slack = noise * max(1.0, gain.ratio)
    return (
        within
        and min(promised / 2, promised * 2) - slack
        <= got
        <= max(promised / 2, promised * 2) + slack
    )


def _limits(place: CacheDirectory) -> list[dict[str, Any]]:
    rows = []
    for what, cause, train_limited in LIMITED:
        limit = bottleneck_of_run(train_limited(place))
        assert limit is not None
        part = limit.part(limit.limit)
        rows.append(
            {
                "what": what,
                "cause": cause,
                "judged": limit.limit,
                "share": None if part is None else part.share,
                "low": None if part is None else part.low,
                "high": None if part is None else part.high,
                "decided": limit.decided,
            }
        )
        sys.stderr.write(f"  {json.dumps(rows[-1])}\n")
    return rows


def _followed(
    place: CacheDirectory,
    rule: str,
    before: dict[str, Any],
    beside: dict[str, Any],
    limit: str | None,
) -> dict[str, Any]:
    """Train without and with the advice, one after the other, several times."""
    first = train(place, f"{rule}-advised", limit=limit, **before)
    advice = _advice(first, place, rule)
    after = (
        before
        | {change.key.replace(".", "__"): change.new for change in advice.changes}
        | beside
    )
    rates: dict[str, list[float]] = {"before": [], "after": []}
    for number in range(ROUNDS):
        for name, settings in (("before", before), ("after", after)):
            run = train(place, f"{rule}-{name}-{number}", limit=limit, **settings)
            rates[name].append(
                statistics.median(row.tokens_per_s for row in run.steps[2:])
            )
    ratio = statistics.median(
        new / old for new, old in zip(rates["after"], rates["before"], strict=True)
    )
    gain = advice.gain
    assert gain is not None
    return {
        "rule": rule,
        "promised": gain.ratio,
        "low": gain.low,
        "high": gain.high,
        "delivered": ratio,
        "rates": rates,
        "kept": is_kept(gain, ratio, noise=NOISE_SHARE),
    }


def _advice(run: Run, place: CacheDirectory, rule: str) -> Advice:
    recommendations = advise(context_of_run(run, SystemHost(), data=place.data))
    return next(advice for advice in recommendations if advice.rule == rule)


def _bars(results: dict[str, Any]) -> list[Bar]:
    simulated, limits = results.get("simulated", {}), results.get("limits")
    real = [*results.get("followed", []), *results.get("sizes", [])]
    right = (
        None
        if limits is None
        else float(sum(row["cause"] == row["judged"] for row in limits))
    )
    kept = statistics.fmean(row["kept"] for row in real) if real else None
    figures = (
        simulated.get("right_share"),
        simulated.get("profiles_right_share"),
        right,
        simulated.get("kept_share"),
        simulated.get("silent_share"),
        kept,
    )
    return bars_of(BARS, dict(zip(BARS, figures, strict=True)))


def _table(results: dict[str, Any]) -> str:
    lines = [
        f"{row['what']}: {row['judged']} ({row['share']:.0%} of the step), is"
        f" {row['cause']}"
        for row in results.get("limits", ())
    ]
    for row in (*results.get("followed", ()), *results.get("sizes", ())):
        bounds = (
            "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
        )
        lines.append(
            f"{row['rule']}: promised {row['promised']:.2f}{bounds}, delivered"
            f" {row['delivered']:.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
