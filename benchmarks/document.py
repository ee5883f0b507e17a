"""``python -m benchmarks.document``: write the documents that quote figures, from the files that hold them.

``docs/performance.md`` from ``reports/benchmarks/*.json``, ``docs/gpu-results.md`` from ``reports/gpu/``,
``docs/without-a-gpu.md`` from ``reports/benchmarks/cuda_memory.json``, ``docs/reliability.md`` from
``reports/faults.json``, ``docs/paper.md`` from figures and arithmetic.
"""

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.core.units import format_bytes
from autotune.show.report.markdown import report_markdown
from autotune.store import write_atomically
from benchmarks import advice, cuda_memory, recommendations, tune
from benchmarks.gpu.check.page import results_document
from benchmarks.gpu.check.results import CheckReport

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "reports" / "benchmarks"
GPU_CHECKS = ROOT / "reports" / "gpu"
FAULTS = ROOT / "reports" / "faults.json"
WITHOUT_A_GPU = ROOT / "docs" / "without-a-gpu.md"
MARK = "<!-- Written by make figures from here on. -->"

_TRAINING, _TUNING, _FURTHEST = "training", "tuning", "largest_relative_difference_of_loss"
"""Names in ``reports/faults.json``."""
_PERFORMANCE = """\
# Performance

Written by `make figures` from the files in `reports/benchmarks/`; `make bench` measures them anew. Every ratio is
against a reference that ran in the same process or the same minutes, on two cores of a shared machine without a GPU.

| benchmark | figure | bar | |
|---|---:|---:|---|
"""
_FEED = """
## The feed

Samples and real tokens per second of one process, rows of 512, batches of 64, no loader processes. *Plain* is a
`datasets` table of padded ids and masks with `DataCollatorForLanguageModeling`; *by hand* is ids only, numpy format,
the collator's own mask function; *by hand, further* also reads batches at once and spares the collator its search for
special tokens.

| | samples/s | real tokens/s |
|---|---:|---:|
"""
_SCALE = """
## 202 million samples

Real offsets of real function lengths, token files that are holes, rows packed, random order, page cache {cache} before
every start.

| samples | open | first batch | memory after {batches:,} batches |
|---:|---:|---:|---:|
"""
_TRAIN = """
## The training step

BERT of 4 layers, hidden 256, rows of 512, micro-batches of 8, lengths of real functions without duplicates, fp32, 64
samples per optimizer step on all sides, steps taken in turns. *Paper-style* is the step of the paper's public trainer,
written from its description; *HF Trainer* is transformers' own with its collator, padded to the longest sample.

| | real tokens/s | ours is faster by | validation loss |
|---|---:|---:|---:|
"""
_ESTIMATE = """
## Predicted memory

The largest use by a real CPU step, by the allocator's own events, beside what the trace of small micro-batches predicts
for it.

| | predicted | real | error |
|---|---:|---:|---:|
"""
_PROBE = """
## Finding the largest micro-batch

Memory limited for real on a CPU, the same step everywhere. Ours counts tracing, verification and refutation.

| case | finder | rows | trials | refused | time |
|---|---|---:|---:|---:|---:|
"""
_CHECKPOINT = """
## Saving, and going on

{steps} optimizer steps of {model} on {device}, in turns with and without a save of its {state} at their beginning; what
a block takes longer than the one without is what the save cost. In an asynchronous one the loop itself stood still for
{blocked:.3f} s.

| | time | more than without |
|---|---:|---:|
"""
_RESUME = """
`python -m trainer` going on at {samples:,} samples, page cache {cache}: dataset, model, checkpoint and first batch.

| position | time | first batch alone |
|---|---:|---:|
"""
_WORKERS = """
## Loader workers

Simulated trainings with noise of 1 to 10 % a window, drift, held-up windows and neighbours; *right* is exactly the
smallest count that reaches 98 % of the best, or an undecided that contains it. Trainings in which some count lies
within half a per cent of 98 % count either way, but for the column of clear ones; *undecided* are clear ones, too.

| rule | within 2 % of the best | right | right, clear ones | undecided | windows (median) |
|---|---:|---:|---:|---:|---:|
"""
_REAL_WORKERS = """
On this machine, a replayed step and samples that sleep, so that the answer follows by arithmetic; and a real step on
the tokenised dataset.

| dataset | expected | found | windows | because |
|---|---:|---:|---:|---|
"""
_ON_GPUS = """
## On GPUs

In [a document of their own](gpu-results.md), measured by one command on a machine that has one.
"""
_RELIABILITY = """\
# Reliability

Written by `make figures` from `reports/faults.json`; `make soak` runs the loops anew. A command, or in one loop a
process that it has started, is killed at random moments of its life, several times over, and the command is started
again until it comes to its end; the result must be byte for byte that of an undisturbed run (of 1 worker), no process
may be left behind, and nothing half done may ever have its final name. `make test` runs a sample of every loop
(of the ways to interrupt a training two a day, by the date), and fills a small real disk as well.

| loop | kills | results | byte-identical | time |
|---|---:|---:|---:|---:|
"""
_TRAINING_FAULTS = """
## Training

The trainer under real torchrun with gloo on a CPU: a model of several gradient buckets, accumulation, dropout, more
than one epoch, a checkpoint every 2 steps. *Same record* means that it has every step once, with the losses of an
undisturbed run of as many ranks; the weights are compared byte for byte, and so are the samples of every step. A fault
is injected at a random moment, up to five into one run, each of which is then started again until it comes to its end.

| loop | injected | faults | runs | held in all of them | time |
|---|---|---:|---:|---|---:|
"""

_TUNING_FAULTS = """
## Tuning

`autotune tune --explore` of a small model on a CPU, killed at a random moment of its stages, up to five times, and
started again each time. Every stage has the least of the time, so that what is decided follows from the ledger alone.

| loop | injected | faults | runs | held in all of them | time |
|---|---|---:|---:|---|---:|
"""


_NETWORK = """
## Training over a network

Hosts of their own on one machine (network namespaces), links shaped by `tc tbf`, the trainer's own DDP over gloo, one
core to a host or to two. Predicted from latency, bandwidth, what products lose while a message travels, and steps in
which nothing travels, which took turns with those that are measured; medians of rounds.

| hosts | link | exchange | micro-batches | nothing travels | predicted | measured | off by |
|---:|---:|---|---:|---:|---:|---:|---:|
"""
_CHOSEN = """
What `autotune network` chooses against the default at the same global batch, 200 Mbit/s; the last column is the ratio
of real tokens/s, rounds against each other. 16 bits can halve what travels, so 2 is the most that they can give, and
less the longer a step computes beside it. The bar of 1.8 holds for the least of both numbers of hosts at 64 tokens; of
four hosts two share a core.

| hosts | tokens of a rank and step | default | chosen | step | ratio |
|---:|---:|---:|---|---:|---:|
"""
_USEFUL = """
Useful nodes (at least 90 % efficient at 4 Mi tokens a step): predicted from two nodes of a simulated cluster, and found
by brute force over it. Model and simulator share their physics (rings, trees, buckets, stragglers); what is tried is
whether two nodes tell enough.

| model | cluster | predicted | brute force |
|---|---|---:|---:|
"""


def _network(found: Mapping[str, Any]) -> str:
    text = _NETWORK
    for one in found["predicted"]:
        predicted, measured = one["predicted_s"], one["measured_s"]
        text += (
            f"| {one['hosts']} | {one['bits_per_s'] / 1e6:,.0f} Mbit/s | {one['exchange']} | {one['micro_batches']} | "
            f"{one['without_s']:.3f} s | {predicted:.3f} s | {measured:.3f} s | {predicted / measured - 1:+.1%} |\n"
        )
    text += _CHOSEN
    for one in found["chosen"]:
        gain = "nothing proven" if one["gain"] is None else f"{one['gain']:.2f}"
        text += (
            f"| {one['hosts']} | {one['tokens_per_rank_and_step']} | {one['default_s']:.3f} s | {one['chosen']} | "
            f"{one['chosen_s']:.3f} s | {gain} |\n"
        )
    text += _USEFUL
    for one in found["useful_nodes"]:
        text += f"| {one['model']} | {one['cluster']} | {one['predicted']} | {one['true']} |\n"
    far = found.get("far", [])
    if far:
        worst = max(abs(one["predicted_s"] / one["simulated_s"] - 1) for one in far)
        text += (
            f"\nOn 316 nodes, as the paper has, the step predicted from two is at most {worst:.1%} off the simulated "
            f"one ({len(far)} cases, one micro-batch, 32-bit gradients).\n"
        )
    return text


def main() -> int:
    """Write all documents."""
    figures = read_figures()
    write_atomically(ROOT / "docs" / "performance.md", performance(figures))
    write_atomically(ROOT / "docs" / "gpu-results.md", report_markdown(results_document(read_gpu_checks(GPU_CHECKS))))
    write_atomically(ROOT / "docs" / "paper.md", recommendations.page(figures))
    write_atomically(ROOT / "docs" / "reliability.md", reliability(json.loads(FAULTS.read_text())))
    write_atomically(WITHOUT_A_GPU, without_a_gpu(WITHOUT_A_GPU.read_text(), figures))
    return 0


def without_a_gpu(page: str, figures: Mapping[str, Any]) -> str:
    """Return the page on what is proven without a GPU, with today's figures behind its mark."""
    words, _, _ = page.partition(MARK)
    return f"{words}{MARK}\n\n{cuda_memory.section(figures['cuda_memory'])}"


def read_figures() -> dict[str, Any]:
    """What every benchmark wrote, by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FIGURES.glob("*.json"))}


def read_gpu_checks(kept: Path) -> list[CheckReport]:
    """The newest check of every kind of GPU, by its name.

    Args:
        kept: Holds ``GPU/DATE/gpu-check.json``.
    """
    newest = {path.parts[-3]: path for path in sorted(kept.glob("*/*/gpu-check.json"))}
    return [CheckReport.of(json.loads(path.read_text())) for _, path in sorted(newest.items())]


def performance(figures: Mapping[str, Any]) -> str:
    """All bars, and the tables of those that have more to say."""
    bars = [bar for one in figures.values() for bar in one["bars"]]
    text = _PERFORMANCE + "".join(_bar(bar) for bar in bars)
    if "feed" in figures:
        text += _FEED
        for name, rates in figures["feed"]["rates"].items():
            text += f"| {name} | {_median(rates['samples_per_s']):,.0f} | {_median(rates['tokens_per_s']):,.0f} |\n"
        packing = figures["feed"]["packing_efficiency"]
        text += (
            f"\nPacked rows of 512 are {packing['all']:.2%} full, {packing['without_full_samples']:.2%} without those "
            f"that one sample fills; padded ones would be {packing['padded']:.1%} full.\n"
        )
    if "scale" in figures:
        found = figures["scale"]["figures"]
        text += _SCALE.format(cache=", ".join(found["page_cache"]), batches=found["batches"])
        for name, samples in found["samples"].items():
            runs = found["runs"][name]
            opened, first = (_median([run[key] for run in runs]) for key in ("open_s", "first_batch_s"))
            text += f"| {samples:,} | {opened:.3f} s | {first:.3f} s | {format_bytes(runs[-1]['rss_growth_bytes'])} |\n"
    if "train" in figures:
        text += _TRAIN + _training(figures["train"]["settings"])
    if "estimate" in figures:
        text += _ESTIMATE + _estimates(figures["estimate"]["parts"].get("accuracy", {}))
    if "probe" in figures:
        text += _PROBE + _probes(figures["probe"]["cases"])
    if "checkpoint" in figures:
        text += _saving(figures["checkpoint"]["stall"]) + _resuming(figures["checkpoint"]["resume"])
    if "workers" in figures:
        text += _workers(figures["workers"])
    if "network" in figures:
        text += _network(figures["network"])
    if "advice" in figures:
        text += advice.section(figures["advice"])
    if "tune" in figures:
        text += tune.section(figures["tune"])
    return text + _ON_GPUS


def _workers(found: Mapping[str, Any]) -> str:
    text = _WORKERS
    for name, one in found["simulated"].items():
        shares = ("within_share", "right_share", "right_share_without_borderline", "undecided_share")
        text += f"| {name} | {' | '.join(f'{one[share]:.1%}' for share in shares)} | {one['windows_median']:.0f} |\n"
    text += _REAL_WORKERS
    for name, one in found["real"].items():
        expected = " or ".join(map(str, one["expected"]))
        text += f"| {name} | {expected} | {one['chosen']} | {one['windows']} | {one['choice']} |\n"
    return text


def _training(settings: Mapping[str, Any]) -> str:
    text = ""
    for name, found in settings.items():
        ours = _median(found["real_tokens_per_s"]["ours"])
        for contender, rates in found["real_tokens_per_s"].items():
            loss = found["validation_loss"].get(contender)
            shown = "" if loss is None else f"{loss:.3f}"
            median = _median(rates)
            text += f"| {contender}; {name} | {median:,.0f} | {ours / median:.2f} | {shown} |\n"
    ceilings = ", ".join(f"{found['flop_ratio_ceiling']:.2f} at {name}" for name, found in settings.items())
    return text + (
        "\nRatio of operations per real token, with padding and a head on all positions over what is needed: "
        f"{ceilings}.\nWhere a measured ratio is higher, the rest comes from fewer passes over memory; dropout adds "
        "work on all sides.\n"
    )


def _estimates(accuracy: Mapping[str, Any]) -> str:
    text = ""
    for name, one in accuracy.items():
        predicted, real = one["predicted_bytes"], one["real_bytes"]
        text += f"| {name} | {format_bytes(predicted)} | {format_bytes(real)} | {predicted / real - 1:+.3%} |\n"
    return text


def _probes(cases: Mapping[str, Any]) -> str:
    text = ""
    for case, one in cases.items():
        for name, found in {"ours": one["ours"], **one["rivals"]}.items():
            rows = "none" if found["rows"] is None else str(found["rows"])
            text += (
                f"| {case} | {name.replace('_', ' ')} | {rows} | {found['trials']} | {found['refused']} | "
                f"{found['seconds']:.1f} s |\n"
            )
    return text


def _saving(stall: Mapping[str, Any]) -> str:
    blocks = stall["block_s"]
    text = _CHECKPOINT.format(
        steps=stall["steps_per_block"],
        model=stall["model"],
        device="two CPU cores" if stall["device"] == "cpu" else stall["device"],
        state=format_bytes(stall["state_bytes"]),
        blocked=_median(stall["blocked_s"]),
    )
    for name, seconds in blocks.items():
        more = _median([one - without for one, without in zip(seconds, blocks["none"], strict=True)])
        what = "no save" if name == "none" else f"{name} save" if name.endswith("synchronous") else f"`{name}`, synced"
        text += f"| {what} | {_median(seconds):.2f} s | {'' if name == 'none' else f'{more:.2f} s'} |\n"
    return text


def _resuming(resume: Mapping[str, Any]) -> str:
    text = _RESUME.format(samples=resume["samples"], cache=resume["page_cache"])
    for name, key in (("near the start of the epoch", "start_s"), ("in its middle", "middle_s")):
        text += f"| {name} | {_median(resume[key]):.3f} s | {_median(resume['first_batch'][key]):.3f} s |\n"
    return text


def reliability(faults: Mapping[str, Any]) -> str:
    """The loops and what they came to."""
    text = _RELIABILITY
    for name, found in faults.items():
        if isinstance(found, dict) and name not in (_TRAINING, _TUNING):
            results = found.get("datasets", found.get("copies"))
            text += (
                f"| {name} | {found['kills']} | {results} | {found['byte_identical']} | {found['seconds']:.0f} s |\n"
            )
    if _TUNING in faults:
        text += _TUNING_FAULTS + _injected(faults[_TUNING])
    return text + (_training_faults(faults[_TRAINING]) if _TRAINING in faults else "")


def _injected(loops: Mapping[str, Any]) -> str:
    """A row for each loop that says what was injected, and what held."""
    return "".join(
        f"| {name} | {found['injected']} | {found['faults']} | {found['runs'] or 'n/a'} | {found['held']} | "
        f"{found['seconds']:.0f} s |\n"
        for name, found in loops.items()
    )


def _training_faults(loops: Mapping[str, Any]) -> str:
    text = _TRAINING_FAULTS + _injected(loops)
    furthest = [one[_FURTHEST] for one in loops.values() if _FURTHEST in one]
    if furthest:
        text += (
            f"\nWith other ranks or strategies than it began with, no loss was further than {max(furthest):.1g}, "
            "relative, from that of the undisturbed one (without dropout).\n"
        )
    return text


def _bar(bar: Mapping[str, Any]) -> str:
    verdict = {True: "ok", False: "**short**", None: "not measured"}[bar["holds"]]
    figure = "n/a" if bar["figure"] is None else _number(bar["figure"], bar["unit"])
    sign = {">=": "≥", "<=": "≤"}[bar["direction"]]
    return f"| `{bar['name']}` | {figure} | {sign} {_number(bar['bar'], bar['unit'])} | {verdict} |\n"


def _number(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(round(value))
    return f"{value:.2%}" if unit == "share" else f"{value:.3g}{' s' if unit == 's' else ''}"


def _median(values: list[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    sys.exit(main())
