"""What fits: the ledger of memory, and throughput by micro-batch with its knee."""

from collections.abc import Mapping

from autotune.core.allocations import ACTIVATIONS, is_activations
from autotune.core.evidence import CurvePoint, ProbeEvidence
from autotune.core.units import format_bytes, format_count, format_seconds, format_share
from autotune.show.charts.drawing import Axis, Line, Lines, Point, Rule, Shade, Stack, Stacks
from autotune.show.intervals import bounds
from autotune.show.report.document import Block, Chart, Missing, Paragraph, Strong, Table, sentence
from autotune.show.report.figures import count, plural
from autotune.show.report.inputs import ReportedProfile

_MOST_PARTS = 7
"""Of a bar; more cannot be told apart."""


def memory(one: ReportedProfile) -> tuple[Block, ...]:
    """Where memory goes: predicted by term, measured in all, and the budget."""
    probe = one.profile.evidence.probe
    if probe is None:
        return (Missing(what="What fits", commands=(one.probe,)),)
    return (_found(one, probe), _ledger(one, probe) if probe.traced_terms_bytes else _not_traced(probe))


def _found(one: ReportedProfile, probe: ProbeEvidence) -> Table:
    constraints, train = one.profile.constraints, one.profile.train
    traced = format_bytes(probe.traced_peak_bytes) if probe.traced_peak_bytes is not None else "not predicted"
    rows: list[list[str | None]] = [
        ["memory budget per rank", format_bytes(constraints.memory_budget_bytes)],
        ["largest micro-batch that ran", f"{probe.feasible_max} rows of {train.seq_length_tokens} tokens"],
        ["smallest that was refused", f"{probe.infeasible_min} rows" if probe.infeasible_min else "none tried"],
        [f"peak of the largest, {one.profile.fingerprint.bytes_known}", format_bytes(probe.feasible_peak_bytes)],
        ["the same, predicted before any trial", traced],
        ["the same, predicted with smaller trials", format_bytes(probe.predicted_peak_bytes)],
        ["largest micro-batch, predicted", f"{probe.traced_rows} rows" if probe.traced_rows is not None else None],
        ["parameters", format_count(probe.parameters)],
        ["ranks that stepped together", str(probe.local_ranks)],
        ["micro-batches of a step", "several" if probe.micro_batches_per_step > 1 else "one"],
        ["layout of rows", train.layout],
        ["real tokens in a row, mean", f"{probe.mean_real_tokens_per_row:.1f}"],
        ["trials until both were proven", str(probe.search_trials)],
        ["time of all trials", format_seconds(probe.seconds)],
        ["headroom left free", format_share(constraints.headroom_share)],
        ["micro-batch used", f"{train.micro_batch_rows} rows: {probe.choice}"],
    ]
    return Table(caption="What fits", headers=("what", "value"), rows=tuple(rows))


def _not_traced(probe: ProbeEvidence) -> Paragraph:
    why = f": {probe.not_traced}" if probe.not_traced else ""
    return Paragraph(words=(f"Memory was not predicted term by term{why}.",))


def _ledger(one: ReportedProfile, probe: ProbeEvidence) -> Chart:
    terms, measured = probe.traced_terms_bytes, probe.feasible_peak_bytes
    budget = one.profile.constraints.memory_budget_bytes
    whole, known = sum(terms.values()), one.profile.fingerprint.bytes_known
    rows: list[list[str | None]] = [
        [term, format_bytes(size), format_share(size / whole) if whole else None]
        for term, size in sorted(terms.items(), key=lambda item: -item[1])
    ]
    rows.append(["all terms, predicted", format_bytes(whole), "100.0 %"])
    rows.append([f"peak, {known}", format_bytes(measured), _share(measured, whole)])
    rows.append(["memory budget per rank", format_bytes(budget), _share(budget, whole)])
    parts = _parts(terms)
    said = (
        f"Predicted {format_bytes(whole)}: {', '.join(f'{name} {format_bytes(size)}' for name, size in parts)}. "
        f"{known.capitalize()} {format_bytes(measured)}. Budget {format_bytes(budget)}."
    )
    stacks = (
        Stack(label="predicted", parts=parts),
        Stack(label=known, parts=((f"peak, {known}", float(measured)),)),
    )
    rules = (Rule(at=float(budget), label="memory budget"),)
    return Chart(
        title=f"Where the memory of {plural(probe.feasible_max, 'row')} goes",
        description=said,
        drawing=Stacks(axis=Axis(label="memory of a rank", unit="bytes"), stacks=stacks, rules=rules),
        table=Table(
            caption="The same term by term", headers=("term", "size", "of the predicted"), rows=tuple(rows),
            align="lrr",
        ),
    )  # fmt: skip


def _share(size: float, whole: int) -> str | None:
    return format_share(size / whole) if whole else None


def _parts(terms: Mapping[str, int]) -> tuple[tuple[str, float], ...]:
    """Terms as the chart has them: all activations as one, and the smallest together."""
    joined: dict[str, float] = {}
    for term, size in terms.items():
        name = ACTIVATIONS if is_activations(term) else term
        joined[name] = joined.get(name, 0.0) + max(0, size)
    ranked = sorted(joined.items(), key=lambda item: -item[1])
    rest = sum(size for _, size in ranked[_MOST_PARTS - 1 :])
    if len(ranked) <= _MOST_PARTS:
        return tuple(ranked)
    return (*ranked[: _MOST_PARTS - 1], ("everything else", rest))


def curve(one: ReportedProfile) -> tuple[Block, ...]:
    """Throughput by micro-batch, with the stretch in which the knee lies."""
    probe = one.profile.evidence.probe
    if probe is None or not probe.curve:
        return (
            Missing(
                what="Throughput by micro-batch",
                commands=(one.probe,),
            ),
        )
    knee = probe.knee_rows
    said = f"{sentence(probe.choice)} A slot is a place in a row, padding included; these rows are full."
    where = "Where the knee lies is not known: single steps show no spread."
    if len(knee) == 2:
        where = f"The knee lies between {knee[0]} and {knee[1]} rows, for all that the noise tells."
        where = where if knee[0] != knee[1] else f"The knee lies at {knee[0]} rows."
    chart = Chart(
        title="Slot tokens per second by rows of a micro-batch",
        description=f"{_described(probe)} {where}",
        drawing=_drawing(one, probe),
        table=_curve_table(probe),
    )
    used = Strong(text=f"{plural(one.profile.train.micro_batch_rows, 'row')} are used. ")
    return (chart, Paragraph(words=(used, f"{said} {where}")))


def _described(probe: ProbeEvidence) -> str:
    best = max(probe.curve, key=lambda point: point.slot_tokens_per_s)
    first, last = probe.curve[0], probe.curve[-1]
    return (
        f"Slot tokens per second from {count(first.slot_tokens_per_s)} with {plural(first.rows, 'row')} to "
        f"{count(last.slot_tokens_per_s)} with {plural(last.rows, 'row')}; the most is {count(best.slot_tokens_per_s)} "
        f"with {plural(best.rows, 'row')}."
    )


def _drawing(one: ReportedProfile, probe: ProbeEvidence) -> Lines:
    points = tuple(
        Point(x=point.rows, y=point.slot_tokens_per_s, low=point.slot_tokens_per_s_low,
              high=point.slot_tokens_per_s_high)
        for point in probe.curve
    )  # fmt: skip
    knee = probe.knee_rows
    rows = one.profile.train.micro_batch_rows
    used = tuple(Point(x=point.x, y=point.y) for point in points if point.x == rows)
    chosen = (Line(name="used", points=used, kind="dots", colour=5),) if used else ()
    shade = Shade(start=knee[0], end=knee[1], label="the knee lies here") if len(set(knee)) == 2 else None
    return Lines(
        x=Axis(label="rows of a micro-batch", unit="count", log=2, ticks=tuple(point.x for point in points)),
        y=Axis(label="slot tokens/s", unit="count", low=0),
        lines=(Line(name="measured, 95 % interval", points=points, colour=0), *chosen),
        shade=shade,
    )


def _curve_table(probe: ProbeEvidence) -> Table:
    best = max(point.slot_tokens_per_s for point in probe.curve)
    return Table(
        caption="The same as figures (rows full)",
        headers=("rows", "slot tokens/s", "95 % interval", "of the best", "step (median)", "steps timed"),
        rows=tuple(_curve_cells(point, best) for point in probe.curve),
        align="rrrrrr",
    )


def _curve_cells(point: CurvePoint, best: float) -> list[str | None]:
    return [
        str(point.rows),
        count(point.slot_tokens_per_s),
        bounds(point.slot_tokens_per_s_low, point.slot_tokens_per_s_high, count),
        format_share(point.slot_tokens_per_s / best),
        format_seconds(point.step_s),
        str(point.timed_steps),
    ]
