"""The answer: what to set, what it yields, and what limits it. Three lines for each profile."""

from collections.abc import Sequence

from autotune.core.advice import Advice
from autotune.core.bottleneck import Bottleneck
from autotune.core.interval import SHOWN_CONFIDENCE
from autotune.core.units import format_share
from autotune.decide.rates import Rate, tuned_rate
from autotune.show.intervals import with_bounds, with_interval
from autotune.show.report.document import Block, Code, Pairs, Strong, Table, Words
from autotune.show.report.figures import count, plural
from autotune.show.report.inputs import ReportedProfile, ReportedRun
from autotune.show.report.steps import cause_words
from autotune.show.workers import chosen_loader


def answer(one: ReportedProfile, runs: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """Set, yields, limits."""
    pairs = (("Set", _settings(one)), ("It yields", _yield(one)), ("What limits it", _limit(one, runs)))
    return (Pairs(pairs=pairs),)


def at_a_glance(profiles: Sequence[ReportedProfile], runs: tuple[ReportedRun, ...]) -> Table:
    """The answers side by side."""
    return Table(
        caption="All profiles",
        headers=("profile", "micro-batch rows", "loader workers", "exchange", "real tokens/s", "ranks", "limit"),
        rows=tuple(_glance(one, runs) for one in profiles),
        align="lrrlrrl",
    )


def _glance(one: ReportedProfile, runs: tuple[ReportedRun, ...]) -> list[str | None]:
    train, rate, found = one.profile.train, tuned_rate(one.profile), _bottleneck(one, runs)
    return [
        one.title,
        str(train.micro_batch_rows),
        str(train.data.loader_workers),
        f"{train.parallel.strategy}, {train.parallel.gradient_dtype}",
        None if rate is None else with_interval(rate.interval, count),
        None if rate is None else str(rate.ranks),
        None if found is None else cause_words(found.limit),
    ]


def _settings(one: ReportedProfile) -> Words:
    train, workers = one.profile.train, one.profile.evidence.workers
    said = (
        f" of {train.seq_length_tokens} tokens, {train.layout}, {train.precision}; global batch "
        f"{plural(train.global_batch_rows, 'row')} ({count(one.profile.constraints.global_batch_tokens)} real tokens); "
    )
    loader = chosen_loader(workers) if workers else str(train.data.loader_workers)
    doubt = ""
    if workers is None:
        doubt = " (not measured)"
    elif workers.undecided_between:
        doubt = f" (undecided between {' and '.join(map(str, workers.undecided_between))})"
    parallel = train.parallel
    exchange = f"{parallel.strategy}, {parallel.gradient_dtype} gradients, {parallel.bucket_cap_mib} MiB buckets"
    network = exchange if one.profile.evidence.network is not None else f"{exchange} (not measured)"
    return (
        Strong(text=f"micro-batch {plural(train.micro_batch_rows, 'row')}"),
        said,
        Strong(text=f"loader workers {loader}"),
        f"{doubt}; exchange {network}. All of it stands in ",
        Code(text=str(one.path)),
        ".",
    )


def _yield(one: ReportedProfile) -> Words:
    rate = tuned_rate(one.profile)
    if rate is None:
        command = next(iter(one.probe_first), f"autotune baseline --profile {one.quoted}")
        return ("not measured: ", Code(text=command))
    stale = ""
    if not one.intact:
        stale = " The profile was edited by hand since: this is what it yielded before."
    elif _advised(one):
        stale = " Advice has changed the step since: this is what it yielded before."
    network = one.profile.evidence.network
    useful = "" if network is None or network.useful_nodes is None else (
        f" Up to {plural(network.useful_nodes, 'node')} are useful at this global batch (predicted)."
    )  # fmt: skip
    return (
        Strong(text=rate_words(rate)),
        f" on {plural(rate.ranks, 'rank')}, {rate.known}: {rate.source}.{stale}{useful}",
    )


def _advised(one: ReportedProfile) -> bool:
    """Whether what was measured of training was dropped when advice changed the step."""
    evidence = one.profile.evidence
    return "advise" in one.profile.provenance.commands and evidence.workers is None and evidence.baseline is None


def rate_words(rate: Rate) -> str:
    """With its interval."""
    return f"{with_interval(rate.interval, count)} real tokens/s"


def _limit(one: ReportedProfile, runs: tuple[ReportedRun, ...]) -> Words:
    found = _bottleneck(one, runs)
    given = [*one.advice, *(advice for run in runs if run.profile_path == one.path for advice in run.advice)]
    advice = next((advice for advice in given if advice.severity != "note"), None)
    if found is None:
        limit: Words = ("not measured: the parts of a step are read from a training run. ",)
    else:
        limit = _limit_words(found)
    return (*limit, *_first(advice))


def _bottleneck(one: ReportedProfile, runs: tuple[ReportedRun, ...]) -> Bottleneck | None:
    """Of its runs, which train, before the one of its tuning."""
    of_runs = (found for run in runs if run.profile_path == one.path for found in run.bottlenecks)
    return next(of_runs, next(iter(one.bottlenecks), None))


def _limit_words(found: Bottleneck) -> Words:
    part = found.part(found.limit)
    share = ""
    if part is not None:
        share = f", {with_bounds(part.share, part.low, part.high, format_share, SHOWN_CONFIDENCE)} of a step"
    decided = "" if found.decided else "; the interval leaves it open"
    return (Strong(text=cause_words(found.limit)), f"{share} ({found.source}){decided}. ")


def _first(advice: Advice | None) -> Words:
    if advice is None:
        return ("No change is known to pay.",)
    command: Words = () if advice.command is None else (" ", Code(text=advice.command))
    return ("First: ", advice.claim.rstrip("."), ".", *command)
