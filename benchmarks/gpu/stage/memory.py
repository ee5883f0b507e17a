"""Stage ``memory``: predicted memory beside a GPU's, and the largest micro-batch, over many configurations.

For each configuration: trace, predict the largest micro-batch, then find the true one by trials under the allocator's
own limit. Kept are the error of the peak that the trace alone predicted, the error once the first trial that fitted, of
fewer rows, has calibrated it, and the predicted largest beside the true one. Where the card has more memory than an
H100 NVL, most of them run with that card's memory, and memory is what carries over to it; speed does not.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotune.core.cards import Card, find_card
from autotune.core.outcome import Measured
from autotune.decide.search import bracket, predict_bytes
from autotune.decide.surroundings import expected_on_cpu, expected_on_gpu
from autotune.errors import AutotuneError
from autotune.measure.machine import Machine
from autotune.search.estimate import Estimate, estimate_model
from autotune.search.probe import ProbeRequest, Search, room_of, trace_request
from autotune.search.site import Site, memory_budget
from benchmarks.gpu.check.children import Ended
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import NoTimeLeft, Rig, TimeBox, check_end, say
from benchmarks.gpu.check.sizes import Sizes
from tests.simulators.corpora import synthetic_manifest
from trainer.config import Checkpointing, Head, Layout, Precision
from trainer.errors import TrainerError
from trainer.presets import model_settings

IMITATED = "h100-nvl-94gb"
"""The paper's card."""
DOCUMENTS_PER_ROW = 4.0
MAX_ROWS = 16_384
TRIAL_TIMEOUT_S = 240.0
PAPER_PROGRAM = "benchmarks.gpu.alone.paper"
PAPER_SHARE = 0.5
"""Of the time that is left, that the paper-style step's own rows may take."""
STYLES = ("tuned", "paper-style")
"""Of the configurations whose largest micro-batch is a figure of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One configuration."""

    model: str
    precision: Precision = "bf16"
    dropout: float | None = 0.0
    """Of attention weights: 0 lets GPUs take varlen kernels, None is the model's own."""
    layout: Layout = "packed"
    head: Head = "masked"
    micro_batches: int = 2
    checkpointing: Checkpointing = "none"
    card: Literal["whole", "imitated"] = "imitated"
    seq_length_tokens: int = 512
    style: str | None = None
    """One of ``STYLES``."""

    @property
    def varlen(self) -> bool:
        """Whether a GPU computes its attention with varlen kernels."""
        return self.dropout == 0.0 and self.precision == "bf16"

    @property
    def name(self) -> str:
        """In a few words."""
        kernel = "varlen" if self.varlen else "sdpa"
        words = [self.precision, kernel, f"{self.layout} rows of {self.seq_length_tokens}"]
        words += ["head on all places"] if self.head == "dense" else []
        words += [f"{self.checkpointing} checkpointing"] if self.checkpointing != "none" else []
        words.append("at most 94 GB" if self.card == "imitated" else "whole card")
        return f"{self.model}{f' {self.style}' if self.style else ''}: {', '.join(words)}"


def tuned(model: str, **changes: Any) -> Setting:  # noqa: ANN401 - any of its fields
    """As this project sets a model up for a GPU."""
    return replace(Setting(model=model, style="tuned"), **changes)


def paper_style(model: str, **changes: Any) -> Setting:  # noqa: ANN401 - any of its fields
    """As the paper's trainer sets it up: fp32, padded rows, a head on every place, no accumulation."""
    plain = Setting(
        model=model, precision="fp32", dropout=None, layout="padded", head="dense", micro_batches=1, style="paper-style"
    )
    return replace(plain, **changes)


SETTINGS = (
    tuned("bert-120m"),
    paper_style("bert-120m"),
    tuned("bert-350m"),
    paper_style("bert-350m"),
    Setting(model="modernbert-base"),
    Setting(model="bert-120m", dropout=None),
    Setting(model="bert-350m", checkpointing="full"),
    Setting(model="bert-120m", dropout=None, seq_length_tokens=128),
    Setting(model="bert-120m", checkpointing="selective"),
    Setting(model="modernbert-large", card="whole"),
    Setting(model="bert-120m", precision="fp32"),
    Setting(model="modernbert-base", checkpointing="full", card="whole", seq_length_tokens=1024),
    Setting(model="bert-350m", card="whole"),
    Setting(model="modernbert-base", precision="fp32"),
)
TINY = (
    tuned("bert-mini", precision="fp32", seq_length_tokens=64),
    paper_style("bert-mini", seq_length_tokens=64),
)


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """All configurations that there is time for; those that an earlier check had before it was cut off are kept.

    Raises:
        NoTimeLeft: If the time was over before all of them, or before the paper-style step's own.
        TrialFailed: If the paper-style step failed.
    """
    settings = TINY if rig.sizes.name == "tiny" else SETTINGS
    earlier = rig.go_on("memory", sheet)
    kept = earlier.details if earlier else {}
    accounts: dict[str, dict[str, Any]] = {
        name: account for name, account in kept.get("settings", {}).items() if "peak_bytes" in account
    }
    missing = [one for one in settings if one.name not in accounts]
    shown = sheet.details["settings"] = {
        one.name: accounts.get(one.name, {"not measured": "no time"}) for one in settings
    }

    def measure_all(some: Iterable[Setting], traces: Mapping[str, "Future[Estimate]"]) -> None:
        for one in some:
            shown[one.name] = accounts[one.name] = account = _measure(rig, one, traces[one.name], box)
            say(f"  {one.name}: {_told(account)}")

    # The paper's own figures come before configurations that only widen the comparison.
    try:
        with _traces(rig, missing) as traces:
            measure_all((one for one in missing if one.style), traces)
            ended = _measure_paper(rig, sheet, kept.get("paper_step", {}), box.part(PAPER_SHARE))
            measure_all((one for one in missing if not one.style), traces)
        check_end(ended)
    finally:
        for one in settings:
            if one.style and one.name in accounts:
                _write_largest(sheet, one, accounts[one.name])
        _write_errors(sheet, list(accounts.values()))


def imitated_card(site: Site) -> Card | None:
    """The card to be imitated; None where the GPU here has no more memory than that."""
    card = find_card(IMITATED)
    return card if site.gpu is not None and site.gpu.total_bytes > card.total_bytes else None


def request_for(site: Site, sizes: Sizes, one: Setting) -> ProbeRequest:
    """What is probed of a configuration."""
    as_card = imitated_card(site) if one.card == "imitated" else None
    return ProbeRequest(
        settings=model_settings(one.model),
        manifest=synthetic_manifest(sizes.vocab_size),
        seq_length_tokens=one.seq_length_tokens,
        layout=one.layout,
        attention_dropout=one.dropout,
        # By its name, so that it is refused, rather than replaced in silence, where it cannot be had.
        attention="varlen" if one.varlen and site.device == "cuda" else "auto",
        precision=one.precision,
        checkpointing=one.checkpointing,
        head=one.head,
        device=site.device,
        memory_budget_bytes=sizes.memory_budget_bytes or memory_budget(site, None, as_card),
        headroom_share=0.0,
        max_rows=MAX_ROWS,
        trial_timeout_s=TRIAL_TIMEOUT_S,
        device_used_before_bytes=site.device_used_bytes,
        micro_batches=one.micro_batches,
        documents_per_row=DOCUMENTS_PER_ROW if one.layout == "packed" else 1.0,
        expected=expected_on_gpu(site.gpu.compute_capability, 1, site.cuda_bytes) if site.gpu else expected_on_cpu(),
    )


@contextmanager
def _traces(rig: Rig, settings: Sequence[Setting]) -> Iterator[Mapping[str, "Future[Estimate]"]]:
    """Trace one configuration after the other, on a machine of their own: it needs no GPU, and trials need no CPU."""

    def trace(machine: Machine, one: Setting) -> Estimate:
        request = request_for(rig.site, rig.sizes, one)
        return estimate_model(trace_request(request), machine, room_of(request))

    machine = rig.another_machine()
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        yield {one.name: pool.submit(trace, machine, one) for one in settings}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        machine.close()


def _measure(rig: Rig, one: Setting, traced: "Future[Estimate]", box: TimeBox) -> dict[str, Any]:
    """One configuration: predict, and find.

    Raises:
        NoTimeLeft: If the time is over.
    """
    search = Search(request=request_for(rig.site, rig.sizes, one), runner=rig.runner(box))
    try:
        search.estimate = traced.result(timeout=box.left_s)
        search.predict()
    except TimeoutError as error:
        raise NoTimeLeft("no time left: its trace had not ended") from error
    except AutotuneError as error:  # trials alone show the way then
        search.not_traced = error.message
    try:
        search.find()
    except (AutotuneError, TrainerError) as error:  # one configuration must not cost the others
        return {"not measured": error.message}
    if one.style == "tuned" and rig.largest is None:
        rig.largest = search
    return account(search)


def account(search: Search) -> dict[str, Any]:
    """Predicted beside measured; calibrated is what the first trial that fitted makes of the prediction."""
    largest = bracket(search.tried).feasible_max
    if not largest:
        return {"not measured": "not even one row fits"}
    peaks = [one.peak_bytes for one in search.tried if one.rows == largest and one.peak_bytes is not None]
    first = next((one for one in search.tried if one.fits and one.rows < largest), None)
    outside = [
        done.outcome.figures["outside_allocator_bytes"] or 0
        for done in search.runner.finished
        if isinstance(done.outcome, Measured)
    ]
    return {
        "budget_bytes": search.request.memory_budget_bytes,
        "largest_rows": largest,
        "predicted_rows": search.predicted_rows(),
        "not_traced": search.not_traced,
        "peak_bytes": peaks[0],
        "traced_peak_bytes": search.traced_bytes(largest) if search.traced_bytes else None,
        "calibrated_by_rows": first.rows if first else None,
        "calibrated_peak_bytes": predict_bytes([first], largest, search.prediction) if first else None,
        "trials": [[one.rows, one.fits, one.peak_bytes] for one in search.tried],
        "outside_allocator_bytes": max(outside, default=None),
    }


def _measure_paper(rig: Rig, sheet: Sheet, known: Mapping[str, Any], box: TimeBox) -> Ended:
    """The largest micro-batch of the paper-style step itself, of each model; returns how the program ended."""
    sizes, site = rig.sizes, rig.site
    budget_bytes = sizes.paper_budget_bytes or memory_budget(site, None, imitated_card(site))
    models = sizes.tuned_models
    words = [word for model in models for word in ("--model", model)]
    words += ["--device", site.device, "--budget-bytes", str(budget_bytes), "--vocab-size", str(sizes.vocab_size)]
    used_bytes = site.device_used_bytes
    words += [] if used_bytes is None else ["--used-before-bytes", str(used_bytes)]
    found, ended = rig.program(PAPER_PROGRAM, words, box, known=known)
    sheet.details["paper_step"] = found
    for model in models:
        rows = found.get(model, {}).get("largest_rows")
        name = f"paper_step_{model.replace('-', '_')}_largest_rows_count"
        sheet.measured(name, rows, lacking="the program did not come to it")
    return ended


def _write_largest(sheet: Sheet, one: Setting, account: Mapping[str, Any]) -> None:
    name = f"{one.style} {one.model}".replace("-", "_").replace(" ", "_")
    lacking = str(account.get("not measured", ""))
    sheet.measured(
        f"{name}_largest_rows_count",
        account.get("largest_rows"),
        expected=account.get("predicted_rows"),
        lacking=lacking,
    )


def _write_errors(sheet: Sheet, accounts: Sequence[Mapping[str, Any]]) -> None:
    """Errors of peaks and of the largest micro-batch, over all configurations that were measured."""
    measured = [one for one in accounts if one.get("peak_bytes") and one["traced_peak_bytes"]]
    before = [abs(one["traced_peak_bytes"] / one["peak_bytes"] - 1) for one in measured]
    after = [
        abs(one["calibrated_peak_bytes"] / one["peak_bytes"] - 1) for one in measured if one["calibrated_peak_bytes"]
    ]
    above = [one["predicted_rows"] / one["largest_rows"] - 1 for one in measured]
    nothing = "no configuration was measured"
    sheet.measured("configurations_count", len(measured))
    for name, figure in (
        ("median_error_before_trials_share", statistics.median(before) if before else None),
        ("median_error_after_calibration_share", statistics.median(after) if after else None),
        ("worst_error_before_trials_share", max(before, default=None)),
        ("predicted_rows_above_true_share", max(above, default=None)),
    ):
        sheet.measured(name, figure, lacking=nothing)


def _told(account: Mapping[str, Any]) -> str:
    if "not measured" in account:
        return f"not measured: {account['not measured']}"
    return f"{account['largest_rows']} rows fit, {account['predicted_rows']} were predicted"
