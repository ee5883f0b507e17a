"""The tuning report as Markdown: what was found, the evidence, what to do next."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.evidence import ProbeEvidence, WorkersEvidence
from autotune.core.profile import Profile
from autotune.core.trial import FinishedTrial
from autotune.core.units import format_bytes, format_count, format_seconds, format_share
from autotune.show import network as network_table
from autotune.show import workers as workers_table
from autotune.show.probe import trial_rows
from autotune.show.tables import markdown_inert, markdown_table
from trainer.config import TrainConfig
from trainer.record import Run, StepRow

NOT_MEASURED = "not measured"
SMALL_TERM_SHARE = 0.005
"""Terms of the ledger below this are left out."""
FULL_ENOUGH_SHARE = 0.9
"""Below this, padding is worth a word."""
_MOST_EVENTS = 10
"""Of a run that are shown; its record has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedProfile:
    """A profile with the trials behind it."""

    path: Path
    profile: Profile
    intact: bool
    trials: tuple[FinishedTrial, ...]
    damaged_lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """A training run and the profile it was started from, if that is one of the report's."""

    run: Run
    profile_path: Path | None


def report_markdown(profiles: Sequence[ReportedProfile], runs: Sequence[ReportedRun]) -> str:
    """The whole report."""
    sections = ["# Tuning report", _answer(profiles, runs)]
    for one in profiles:
        sections += [f"## {markdown_inert(one.profile.train.model.name)}", _probe(one), _curve(one), _workers(one)]
        sections.append(_network(one))
    sections += ["## Training runs", _runs(runs), "## What to do next", _next(profiles, runs)]
    sections += ["## Where it was measured", _machine(profiles), "## Every trial", *(_trials(one) for one in profiles)]
    return "\n\n".join(sections) + "\n"


def _answer(profiles: Sequence[ReportedProfile], runs: Sequence[ReportedRun]) -> str:
    headers = ("model", "largest micro-batch", "first refused", "micro-batch used", "slot tokens/s", "loader workers")
    rows: list[list[str | None]] = []
    for one in profiles:
        train, probe, workers = one.profile.train, one.profile.evidence.probe, one.profile.evidence.workers
        used = next((point for point in probe.curve if point.rows == train.micro_batch_rows), None) if probe else None
        rows.append(
            [
                train.model.name,
                f"{probe.feasible_max} rows" if probe else NOT_MEASURED,
                f"{probe.infeasible_min} rows" if probe and probe.infeasible_min else NOT_MEASURED,
                f"{train.micro_batch_rows} rows",
                format_count(used.slot_tokens_per_s) if used else NOT_MEASURED,
                workers_table.chosen_loader(workers) if workers else NOT_MEASURED,
            ]
        )
    table = markdown_table(headers, rows, align="lrrrrr")
    note = "All figures are measured unless they are called predicted. A slot is a place in a row, padding included."
    return f"{table}\n\n{note}"


def _probe(one: ReportedProfile) -> str:
    probe, constraints, train = one.profile.evidence.probe, one.profile.constraints, one.profile.train
    if probe is None:
        return f"Micro-batch: {NOT_MEASURED} (`autotune probe` would)."
    rows = [
        ["memory budget per rank", format_bytes(constraints.memory_budget_bytes)],
        ["largest micro-batch that ran", f"{probe.feasible_max} rows of {train.seq_length_tokens} tokens"],
        ["its peak, measured", format_bytes(probe.feasible_peak_bytes)],
        ["its peak, predicted before any trial", _traced(probe)],
        ["its peak, predicted with smaller trials", format_bytes(probe.predicted_peak_bytes)],
        [
            "largest micro-batch, predicted",
            f"{probe.traced_rows} rows" if probe.traced_rows is not None else _traced(probe),
        ],
        ["ranks that stepped together", str(probe.local_ranks)],
        ["micro-batches of a step", "several" if probe.micro_batches_per_step > 1 else "one"],
        ["smallest that was refused", f"{probe.infeasible_min} rows" if probe.infeasible_min else "none tried"],
        ["layout of rows", train.layout],
        ["attention dropout", _dropout(train)],
        ["real tokens in a row, mean", f"{probe.mean_real_tokens_per_row:.1f}"],
        ["trials until both were proven", str(probe.search_trials)],
        ["time of all trials", format_seconds(probe.seconds)],
        ["micro-batch used", f"{train.micro_batch_rows} rows: {probe.choice}"],
        [
            "global batch",
            f"{train.global_batch_rows} rows, for {format_count(constraints.global_batch_tokens)} real tokens a step",
        ],
    ]
    edited = "" if one.intact else "\n\nThe profile was edited by hand after it was written."
    return "### Micro-batch\n\n" + markdown_table(("what", "value"), rows) + edited + _ledger(probe)


def _traced(probe: ProbeEvidence) -> str:
    if probe.traced_peak_bytes is not None:
        return format_bytes(probe.traced_peak_bytes)
    return f"not predicted: {probe.not_traced}" if probe.not_traced else "not predicted"


def _ledger(probe: ProbeEvidence) -> str:
    """Where the trace says that the memory goes."""
    if not probe.traced_terms_bytes:
        return ""
    whole = sum(probe.traced_terms_bytes.values())
    rows = [
        [term, format_bytes(size), format_share(size / whole)]
        for term, size in sorted(probe.traced_terms_bytes.items(), key=lambda item: -item[1])
        if size >= SMALL_TERM_SHARE * whole
    ]
    title = f"\n\n### Where the memory of {probe.feasible_max} rows goes (predicted)\n\n"
    return title + markdown_table(("term", "bytes", "share"), rows, align="lrr")


def _curve(one: ReportedProfile) -> str:
    probe = one.profile.evidence.probe
    if probe is None:
        return f"Throughput: {NOT_MEASURED}."
    best = max(point.slot_tokens_per_s for point in probe.curve)
    rows = [
        [
            str(point.rows),
            format_count(point.slot_tokens_per_s),
            format_share(point.slot_tokens_per_s / best),
            format_seconds(point.step_s),
        ]
        for point in probe.curve
    ]
    headers = ("rows", "slot tokens/s", "of the best", "step (median)")
    return "### Throughput by micro-batch (rows full)\n\n" + markdown_table(headers, rows, align="rrrr")


def _workers(one: ReportedProfile) -> str:
    found = one.profile.evidence.workers
    if found is None:
        command = f"`autotune workers --profile {markdown_inert(str(one.path))}`"
        return f"### Loader workers\n\n{NOT_MEASURED} ({command} would)."
    table = markdown_table(
        workers_table.HEADERS, [workers_table.workers_cells(row) for row in found.rows], align=workers_table.ALIGN
    )
    counters = workers_table.gpu_rows(found)
    parts = [table]
    if counters:
        parts.append(markdown_table(workers_table.GPU_HEADERS, counters, align=workers_table.GPU_ALIGN))
    lines = [f"Chosen: **{workers_table.chosen_loader(found)}**. {_sentence(found.choice)}"]
    if found.refusal:
        lines.append(_sentence(found.refusal))
    lines += [_sentence(line) for line in workers_table.workers_lines(found)]
    return "### Loader workers\n\n" + "\n\n".join([*parts, "\n".join(f"- {line}" for line in lines)])


def _network(one: ReportedProfile) -> str:
    found = one.profile.evidence.network
    if found is None:
        command = f"`autotune network --profile {markdown_inert(str(one.path))} --slurm`"
        return f"### Network and exchange of gradients\n\n{NOT_MEASURED} ({command} would, on two nodes)."
    parts = [
        markdown_table(
            network_table.LINK_HEADERS,
            [network_table.link_cells(link) for link in found.links],
            align=network_table.LINK_ALIGN,
        )
    ]
    if found.exchanges:
        cells = [network_table.exchange_cells(row) for row in found.exchanges]
        parts.append(markdown_table(network_table.EXCHANGE_HEADERS, cells, align=network_table.EXCHANGE_ALIGN))
    if found.scaling:
        cells = [network_table.scaling_cells(row) for row in found.scaling]
        parts.append(markdown_table(network_table.SCALING_HEADERS, cells, align=network_table.SCALING_ALIGN))
    lines = "\n".join(f"- {_sentence(line)}" for line in network_table.network_lines(found))
    return "### Network and exchange of gradients\n\n" + "\n\n".join([*parts, lines])


def _sentence(text: str) -> str:
    inert = markdown_inert(text)
    return f"{inert[:1].upper()}{inert[1:]}."


def _runs(runs: Sequence[ReportedRun]) -> str:
    if not runs:
        return f"{NOT_MEASURED.capitalize()}: no run was given (`--run runs/…`)."
    headers = (
        "run", "ranks", "steps", "loss, first → last", "validation loss", "real tokens/s (median)", "MFU", "data wait",
        "end",
    )  # fmt: skip
    table = markdown_table(headers, [_run_cells(one.run) for one in runs], align="lrrrrrrrl")
    changes = [
        f"Change of recipe in {markdown_inert(one.run.directory.name)}: {markdown_inert(change)}."
        for one in runs
        for change in one.run.header.recipe_changes
    ]
    events = "\n".join(line for one in runs for line in _events(one.run))
    return "\n\n".join([table, *changes, *([events] if events else [])])


def _dropout(train: TrainConfig) -> str:
    if train.attention_dropout is None:
        return "the model's"
    return f"{train.attention_dropout:g}, a change of recipe"


def _run_cells(run: Run) -> list[str | None]:
    steps = run.steps
    later = steps[1:] or steps  # the first step pays for what is made once
    mfus = [step.mfu for step in later if step.mfu is not None]
    wait = sum(step.data_wait_s for step in later) / sum(step.step_s for step in later) if later else None
    return [
        run.directory.name,
        str(run.header.world_size),
        str(steps[-1].step) if steps else "0",
        f"{_loss(steps[0])} → {_loss(steps[-1])}" if steps else None,
        f"{run.evaluations[-1].loss:.3f}" if run.evaluations else None,
        format_count(statistics.median(step.real_tokens_per_s for step in later)) if later else None,
        format_share(statistics.median(mfus)) if mfus else None,
        format_share(wait),
        run.end.reason if run.end else "not finished",
    ]


def _loss(step: StepRow) -> str:
    return "n/a" if step.loss is None else f"{step.loss:.3f}"


def _events(run: Run) -> list[str]:
    """What needs attention, as list items; the latest, where there are many."""
    told = [event for event in run.events if event.level != "info"]
    lines = [
        f"- {markdown_inert(run.directory.name)}, step {event.step}: {markdown_inert(event.message)}"
        for event in told[-_MOST_EVENTS:]
    ]
    if len(told) > len(lines):
        lines.insert(0, f"- {markdown_inert(run.directory.name)}: {len(told) - len(lines)} earlier events")
    return lines


def _next(profiles: Sequence[ReportedProfile], runs: Sequence[ReportedRun]) -> str:
    lines = [line for one in profiles for line in _next_for(one, runs)]
    return "\n".join(lines) or "- Nothing: these settings are the best of what was measured."


def _next_for(one: ReportedProfile, runs: Sequence[ReportedRun]) -> list[str]:
    train, probe, workers = one.profile.train, one.profile.evidence.probe, one.profile.evidence.workers
    name, path = markdown_inert(train.model.name), markdown_inert(str(one.path))
    sweep = f"`autotune workers --profile {path}"
    lines: list[str] = []
    if workers is None:
        lines.append(f"count its loader workers: {sweep}`")
    elif workers.undecided_between:
        lines.append(
            f"its worker count is undecided; more time may settle it: {sweep} --minutes {_more_minutes(workers)}`"
        )
    if probe is not None:
        fill = probe.mean_real_tokens_per_row / train.seq_length_tokens
        if fill < FULL_ENOUGH_SHARE:
            lines.append(
                f"rows are {format_share(fill)} full on average, the rest is padding that is computed; shorter rows "
                f"waste less, and cut more samples: `autotune probe --seq-length {train.seq_length_tokens // 2} …`"
            )
        if probe.feasible_max > 2 * train.micro_batch_rows:
            lines.append(
                f"{train.micro_batch_rows} rows are as fast as {probe.feasible_max}: the memory left over has room for "
                "longer rows or a larger model."
            )
    if not any(run.profile_path == one.path for run in runs):
        lines.append(f"train from it: `torchrun --nproc-per-node 2 -m trainer --profile {path} --data DIR`")
    return [f"- {name}: {line}" for line in lines]


def _more_minutes(workers: WorkersEvidence) -> int:
    return max(10, round(4 * workers.seconds / 60))


def _machine(profiles: Sequence[ReportedProfile]) -> str:
    rows: list[list[str | None]] = []
    for field in type(profiles[0].profile.fingerprint).model_fields:
        if field.endswith(("sha256", "hash")):
            continue
        values = [getattr(one.profile.fingerprint, field) for one in profiles]
        shown = [
            None if value is None else format_bytes(value) if field.endswith("_bytes") else str(value)
            for value in values
        ]
        rows.append([field, *shown])
    return markdown_table(("what", *(one.profile.train.model.name for one in profiles)), rows)


def _trials(one: ReportedProfile) -> str:
    rows = trial_rows(list(one.trials))
    table = (
        markdown_table(("trial", "outcome", "optimizer steps", "peak", "time"), rows, align="llrrr")
        if rows
        else "No ledger."
    )
    damaged = f"\n\n{one.damaged_lines} damaged ledger lines were left out." if one.damaged_lines else ""
    return f"### {markdown_inert(one.profile.train.model.name)}\n\n{table}{damaged}"
