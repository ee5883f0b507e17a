"""The check as a page: one document, which becomes the HTML file beside the figures and ``docs/gpu-results.md``.

What was not measured says so in its place, with the command that would measure it.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.core.cards import find_card
from autotune.core.units import format_bytes, format_seconds, format_share
from autotune.show.report.document import Block, Document, Missing, Paragraph, Section, Table
from autotune.show.report.html import report_html
from autotune.show.tables import Row
from benchmarks.gpu.alone.train import RIVAL_ROWS
from benchmarks.gpu.check.bars import GPU_BARS, bars_of
from benchmarks.gpu.check.made_with import PACKAGES
from benchmarks.gpu.check.results import CheckReport, Figure, StageResult, shown_value
from benchmarks.gpu.stage.memory import IMITATED
from benchmarks.gpu.stage.train import RIVALS

_FIGURES = Path(__file__).parents[3] / "reports" / "benchmarks"
PREDICTED = _FIGURES / "gpu_memory.json"
"""What ``benchmarks.gpu.predicted`` wrote."""
PAPER_CASE = _FIGURES / "paper_case.json"
"""What is predicted of the paper's two models on its card, with two ranks."""
ALIKE_SHARE = 0.01
"""Budgets that differ by no more are alike: an H100 NVL leaves a program as much less than it has."""
REPORTED_ROWS = {"bert-120m": 184, "bert-350m": 20}
"""Of the paper, arXiv 2509.05258, recommendation 5."""
PUBLISHED: tuple[tuple[str, float | None, float], ...] = (
    ("ModernBERT base, 8 x H100, bf16, rows of 1,024 (arXiv 2412.13663)", 307_000, 0.256),
    ("ModernBERT large, 8 x H100, bf16, rows of 1,024 (arXiv 2412.13663)", 140_000, 0.327),
    ("BERT-large, 8 x H100, FP8, packed rows of 512 (MLPerf Training v4.0)", None, 0.48),
)
"""Real tokens/s of one GPU where published, and MFU by arithmetic from what was published, of the card's bf16 peak."""
COMMAND = "python -m benchmarks.gpu.all --out DIR --minutes {minutes} --only {stage}"
STAGE_NAMES = (
    "machine", "ceilings", "nvml", "memory", "train", "workers", "maths", "tune", "endurance", "saves", "ranks",
)  # fmt: skip
"""Of the check."""
MINUTES = {"memory": 8, "train": 9, "tune": 16, "endurance": 8}
"""That a stage alone takes in full, about; the others take five at most."""
WHAT = f"bert-120m, {RIVAL_ROWS} rows of 512"
_MEANINGS = {
    "bars": "Set before anything was measured. One that is short is said to be, and is not lowered.",
    "machine": "What the check ran on, and what the device reaches with large matrix products and copies.",
    "nvml": "Matrix products keep the device busy for a known part of the time, by events on the device itself; NVML "
    "and GPM are read beside them.",
    "memory": "Each configuration is traced, its largest micro-batch is predicted, and the true one is proven from "
    "both sides by trials that have no more memory than the budget. Traced, off by: the error of the peak that was "
    "predicted before any trial. Calibrated, off by: the same, once the first trial that fitted, of fewer rows, had "
    "calibrated it.",
    "train": "Whole training loops, loaders and logging included, steps of contenders in turns, medians. MFU counts "
    "what the mathematics of the real tokens asks for: layers, attention within documents, the head where something "
    "is to be predicted, times three; no padding, no recomputing.",
    "workers": "Every sample of the slow dataset takes so long to read that, by arithmetic, three workers are enough. "
    "GPM's figures are those of the sweep's own windows.",
    "maths": "In bf16 sums differ by their order, so a right way is about as far from fp32 as the plain one; a wrong "
    "one, such as attention across documents, is many times farther.",
    "tune": "autotune tune as a user types it, for both models, to profiles and a report; for an H100 NVL where the "
    "card has more memory than that. What its time ended before it was decided is no measure of a tuning.",
    "endurance": "A real training at the largest micro-batch that trials found. An allocation that has to be tried a "
    "second time shows that it was too large. Where 2,000 steps at the largest of an H100 NVL take too long, a smaller "
    "limit of memory is filled the same way.",
    "saves": "Blocks of steps with a save at their beginning, against such without.",
    "ranks": "What only several GPUs of a node can show: NCCL's own memory, the link between them, and that one rank's "
    "running out of memory ends all at once.",
}
_LOADS = {"idle": "idle", "full_load": "full load", "half_load": "half a load"}


def check_page(report: CheckReport) -> str:
    """The HTML file."""
    return report_html(check_document(report))


def check_document(report: CheckReport) -> Document:
    """Everything of one check."""
    size = (
        " Sizes are tiny: this tries the check itself, and says nothing of a device." if report.sizes == "tiny" else ""
    )
    return Document(
        title=f"GPU check: {device_name(report)}",
        subtitle=f"Begun {report.started_utc}, version {report.tool_version}. Figures are measured unless they are "
        f"called predicted.{size}",
        sections=(Section(title="The stages", key="stages", blocks=(_stages(report),)), *sections(report)),
    )


def results_document(reports: Sequence[CheckReport]) -> Document:
    """What is known of all GPUs that were measured; of none, what stands open.

    Args:
        reports: The newest check of each kind of GPU.
    """
    title, labels = (
        "Measured on GPUs",
        "Speeds belong to the card that they were measured on; only memory carries over.",
    )
    if not reports:
        stages = tuple(StageResult(name=name, status="not measured") for name in STAGE_NAMES)
        nothing = CheckReport(
            tool_version="", started_utc="", device="", sizes="full", limit_s=0.0, finished=False, stages=stages
        )
        subtitle = (
            "No GPU has been measured yet: every figure that this project gives for one is predicted, and what could "
            f"not be predicted stands here as not measured, with the command that measures it. {labels}"
        )
        return Document(title=title, subtitle=subtitle, sections=sections(nothing))
    names = ", ".join(f"{device_name(one)} ({one.started_utc[:10]})" for one in reports)
    parts = tuple(
        Section(title=device_name(one), key=one.device, blocks=tuple(_keyed(part, one) for part in sections(one)))
        for one in reports
    )
    return Document(title=title, subtitle=f"By the check of this project: {names}. {labels}", sections=parts)


def _keyed(part: Section, report: CheckReport) -> Section:
    """With a key that no other device's part has."""
    return replace(part, key=f"{report.device}-{part.key}")


def sections(report: CheckReport) -> tuple[Section, ...]:
    """What was found, subject by subject."""
    parts: tuple[tuple[str, str, Sequence[Block]], ...] = (
        ("The bars", "bars", (_bars(report),)),
        ("The machine", "machine", _listed(report, "machine") + _listed(report, "ceilings")),
        ("Counters against a known load", "nvml", _part(report, "nvml", _counters)),
        ("Memory", "memory", (*_part(report, "memory", _memory), _predicted(report), _beside_the_paper(report))),
        ("Training", "train", (*_part(report, "train", _training), _published(report))),
        ("Loader workers", "workers", _part(report, "workers", _workers)),
        ("Mathematics", "maths", _listed(report, "maths")),
        ("A whole tuning", "tune", _part(report, "tune", _tuning)),
        ("Thousands of steps at the largest micro-batch", "endurance", _listed(report, "endurance")),
        ("Saving", "saves", _listed(report, "saves")),
        ("Several ranks", "ranks", _listed(report, "ranks")),
    )
    return tuple(
        Section(title=title, key=key, blocks=(Paragraph(words=(_MEANINGS[key],)), *blocks))
        for title, key, blocks in parts
    )


def device_name(report: CheckReport) -> str:
    """As NVML names it, or as files do."""
    gpus = report.stage("machine").details.get("gpus") or []
    return str(gpus[0]["facts"]["name"]) if gpus else report.device


def _part(report: CheckReport, stage: str, blocks: Callable[[StageResult], Sequence[Block]]) -> tuple[Block, ...]:
    """What a stage found, and what of it is missing."""
    result = report.stage(stage)
    found = tuple(blocks(result)) if result.figures or result.details else ()
    return found if result.status == "measured" else (*found, _missing(result))


def _missing(result: StageResult) -> Missing:
    ranks = " --nproc 2" if result.name == "ranks" else ""
    command = COMMAND.format(minutes=MINUTES.get(result.name, 5), stage=result.name) + ranks
    reason = f" ({result.reason.splitlines()[0]})" if result.reason else ""
    state = "failed" if result.status == "failed" else "not measured"
    what = "the rest of it" if result.figures else "all of it"
    return Missing(what=f"The stage {result.name}, {what}{reason}", state=state, commands=(command,))


def _listed(report: CheckReport, stage: str) -> tuple[Block, ...]:
    """Every figure of a stage, one to a row."""
    return _part(report, stage, lambda result: (_figures(result.name, result.figures),) if result.figures else ())


def _figures(stage: str, figures: Sequence[Figure]) -> Table:
    rows = [
        [
            figure.name.replace("_", " "),
            shown_value(figure.name, figure.value),
            "" if figure.expected is None else shown_value(figure.name, figure.expected),
            figure.label if not figure.reason else f"{figure.label}: {figure.reason}",
        ]
        for figure in figures
    ]
    headers = ("figure", "value", "expected", "known")
    return Table(caption=f"Figures of the stage {stage}", headers=headers, rows=tuple(rows), align="lrrl")


def _stages(report: CheckReport) -> Table:
    rows = [
        [
            one.name,
            one.status,
            format_seconds(one.seconds),
            format_seconds(one.box_s),
            ", ".join(begun[:19] for begun in (*one.details.get("gone_on_from_utc", ()), one.measured_utc or "")),
            " ".join(one.made_with.get(package) or "" for package in PACKAGES),
            one.reason or "",
        ]
        for one in report.stages
    ]
    headers = ("stage", "status", "took", "was allowed", "begun, UTC", "sources", "because")
    return Table(caption="Stages, each in its own time box", headers=headers, rows=tuple(rows), align="llrrlll")


def _bars(report: CheckReport) -> Table:
    rows: list[Row] = []
    for one, bar in zip(GPU_BARS, bars_of(report), strict=True):
        open_ = report.sizes == "tiny" or bar.figure is None
        verdict = "not measured" if open_ else "held" if bar.holds else "SHORT"
        sign = {">=": "at least", "<=": "at most"}[one.direction]
        figure = None if open_ else shown_value(one.figure, bar.figure)
        rows.append([one.meaning, figure, f"{sign} {shown_value(one.figure, one.bar)}", verdict])
    headers = ("figure", "measured", "bar", "")
    return Table(caption="Bars for an H100 or H200", headers=headers, rows=tuple(rows), align="lrrl")


def _counters(result: StageResult) -> Sequence[Block]:
    rows: list[Row] = []
    for key, name in _LOADS.items():
        known = 0.0 if key == "idle" else result.value(f"{key}_busy_share")
        readings = [
            result.value(f"{key}_{reading}_share")
            for reading in ("nvml_utilisation", "gpm_sm_utilisation", "gpm_tensor_active")
        ]
        power_w = result.value(f"{key}_nvml_power_w")
        rows.append([name, *map(_share, (known, *readings)), None if power_w is None else f"{power_w:.0f} W"])
    headers = ("load", "known load", "NVML utilisation", "GPM busy SMs", "GPM tensor cores", "power")
    caption = "Readings beside the load's own events on the device"
    return (Table(caption=caption, headers=headers, rows=tuple(rows), align="lrrrrr"),)


def _memory(result: StageResult) -> Sequence[Block]:
    rows: list[Row] = []
    for name, one in result.details.get("settings", {}).items():
        if "peak_bytes" not in one:
            rows.append([name, *[None] * 6, str(one.get("not measured", ""))])
            continue
        errors = [
            None if one[key] is None else f"{one[key] / one['peak_bytes'] - 1:+.2%}"
            for key in ("traced_peak_bytes", "calibrated_peak_bytes")
        ]
        predicted = None if one["predicted_rows"] is None else f"{one['predicted_rows']:,}"
        sizes = [format_bytes(one[key]) for key in ("budget_bytes", "peak_bytes")]
        rows.append([name, predicted, f"{one['largest_rows']:,}", *sizes, *errors, f"{len(one['trials'])} trials"])
    headers = (
        "configuration",
        "rows, predicted",
        "rows, true",
        "budget",
        "peak",
        "traced, off by",
        "calibrated, off by",
        "",
    )
    caption = "Largest micro-batches, and how far the peak that was predicted for them is off"
    return (Table(caption=caption, headers=headers, rows=tuple(rows), align="lrrrrrrl"),)


def _predicted(report: CheckReport) -> Table:
    """What was predicted for the same configurations before any GPU was measured, beside what was measured."""
    predicted = json.loads(PREDICTED.read_text())
    found = {} if report.sizes == "tiny" else report.stage("memory").details.get("settings", {})
    rows = [
        [
            name,
            format_bytes(one["budget_bytes"]),
            f"{one['rows']:,}",
            f"{one['rows_low']:,} to {one['rows_high']:,}",
            _largest(found.get(name, {}), one["budget_bytes"]),
        ]
        for name, one in predicted["settings"].items()
    ]
    headers = ("configuration", "budget", "rows, predicted", "range", "rows, measured")
    caption = "Predicted without a GPU for one H200, most of it with the memory of an H100 NVL"
    return Table(caption=caption, headers=headers, rows=tuple(rows), align="lrrrr")


def _largest(account: Mapping[str, Any], budget_bytes: int) -> str:
    """The rows that were measured, and under which budget where it is another one."""
    if "largest_rows" not in account:
        return "not measured"
    rows = f"{account['largest_rows']:,}"
    alike = abs(account["budget_bytes"] / budget_bytes - 1) <= ALIKE_SHARE
    return rows if alike else f"{rows} under {format_bytes(account['budget_bytes'])}"


def _beside_the_paper(report: CheckReport) -> Table:
    """The paper's rows, what is predicted for its card with its two ranks, and what was measured with its memory."""
    cases: Mapping[str, Any] = json.loads(PAPER_CASE.read_text())["cases"]
    result, nvl_bytes = report.stage("memory"), find_card(IMITATED).total_bytes
    budgets = [one["budget_bytes"] for one in result.details.get("settings", {}).values() if "budget_bytes" in one]
    # Most configurations run with that card's memory, where there is enough of it.
    if report.sizes == "tiny" or not any(abs(budget / nvl_bytes - 1) <= ALIKE_SHARE for budget in budgets):
        result = StageResult(name="memory", status="not measured")
    rows: list[Row] = []
    for model, reported in REPORTED_ROWS.items():
        for style, case, figure in (
            ("the paper-style step itself", None, "paper_step"),
            ("set up as the paper's trainer", "as the paper's trainer", "paper_style"),
            ("tuned", "tuned", "tuned"),
        ):
            one = cases[case][model] if case else None
            measured = result.value(f"{figure}_{model.replace('-', '_')}_largest_rows_count")
            rows.append(
                [
                    f"{model}, {style}",
                    None if case == "tuned" else f"{reported}",
                    "not predicted" if one is None else f"{one['rows_low']} to {one['rows_high']}",
                    "not measured" if measured is None else f"{measured:,.0f}",
                ]
            )
    headers = ("model", "the paper", "predicted, two ranks", "measured, one rank")
    caption = "Rows of 512 on an H100 NVL of 94 GB; the paper's shape of 350M and its vocabulary are not public"
    return Table(caption=caption, headers=headers, rows=tuple(rows), align="lrrr")


def _training(result: StageResult) -> Sequence[Block]:
    blocks: list[Block] = []
    rates = result.details.get("rivals", {}).get("real_tokens_per_s", {})
    if rates.get("ours"):
        rows = [["ours", _rate(statistics.median(rates["ours"])), ""]]
        for figure, name in RIVALS.items():
            rate, ratio = rates.get(name), result.value(f"against_{figure}_ratio")
            rows.append(
                [name, _rate(statistics.median(rate) if rate else None), "" if ratio is None else f"{ratio:.2f}"]
            )
        headers = (WHAT, "real tokens/s", "ours is faster by")
        blocks.append(Table(caption="Against other trainers, in turns", headers=headers, rows=tuple(rows), align="lrr"))
    found = result.details.get("ablation", {})
    everything = found.get("everything", {}).get("real_tokens_per_s")
    if everything:
        rows = [
            [name, _rate(one.get("real_tokens_per_s")), _of(one.get("real_tokens_per_s"), everything)]
            for name, one in found.items()
            if isinstance(one, dict)
        ]
        headers = (WHAT, "real tokens/s", "of everything")
        blocks.append(Table(caption="One thing left out at a time", headers=headers, rows=tuple(rows), align="lrr"))
    return blocks


def _published(report: CheckReport) -> Table:
    """This project's MFU beside the best that was published."""
    result, device = report.stage("train"), device_name(report)
    if report.sizes == "tiny":
        result = StageResult(name="train", status="not measured")
    rows: list[Row] = []
    for model, name in (("bert_120m", "bert-120m"), ("bert_350m", "bert-350m")):
        rate, mfu = result.value(f"{model}_real_tokens_per_s"), result.value(f"{model}_mfu_share")
        measured = f"this project, {name}, 1 x {device}, bf16, packed rows of 512"
        if rate is None:
            rows.append([f"this project, {name}, bf16, packed rows of 512", "not measured", "not measured"])
        else:
            rows.append([measured, _rate(rate), _share(mfu)])
    rows += [[name, _rate(rate), _share(mfu)] for name, rate, mfu in PUBLISHED]
    headers = ("training", "real tokens/s of one GPU", "MFU")
    caption = "Speed beside published ones; each belongs to its card"
    return Table(caption=caption, headers=headers, rows=tuple(rows), align="lrr")


def _workers(result: StageResult) -> Sequence[Block]:
    blocks: list[Block] = []
    for name in ("fast", "slow"):
        found = result.details.get(name)
        if not found:
            continue
        words = (f"{name.capitalize()} dataset: {found['chosen']} workers. {found['choice']}. {found['gpu_source']}",)
        rows = [_worker_row(one) for one in found["rows"]]
        headers = ("workers", "slot tokens/s", "data-wait", "NVML utilisation", "GPM busy SMs", "GPM tensor cores")
        table = Table(
            caption=f"Windows of the {name} dataset, medians", headers=headers, rows=tuple(rows), align="rrrrrr"
        )
        blocks += [Paragraph(words=words), table]
    return blocks


def _worker_row(one: Mapping[str, Any]) -> Row:
    use = one.get("gpu") or {}
    rates = one.get("slot_tokens_per_s") or []
    rate = statistics.median(rates) if isinstance(rates, list) and rates else rates or None
    counters = [_share(use.get(key)) for key in ("utilisation_share", "gpm_sm_share", "gpm_tensor_share")]
    return [str(one["loader_workers"]), _rate(rate), _share(one["data_wait_share"]), *counters]


def _tuning(result: StageResult) -> Sequence[Block]:
    rows = [
        [one["name"], one["model"], one["status"], format_seconds(one["seconds"]), one["told"]]
        for one in result.details.get("stages", [])
    ]
    headers = ("stage", "model", "status", "took", "told")
    told = (Table(caption="Stages of autotune tune", headers=headers, rows=tuple(rows), align="lllrl"),) if rows else ()
    return (*told, _figures(result.name, result.figures)) if result.figures else told


def _share(value: float | None) -> str | None:
    return None if value is None else format_share(value)


def _rate(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def _of(value: float | None, whole: float) -> str | None:
    return None if value is None else format_share(value / whole)
