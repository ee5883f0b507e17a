"""The explore stage: settings of the step searched together, proven, probed anew, and written into the profile."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from autotune.core.defaults import WINDOW_S
from autotune.core.exploration import ExploreEvidence
from autotune.core.knobs import Knobs
from autotune.core.profile import Profile, profile_to_toml
from autotune.decide.choose import global_batch_rows, rows_with_headroom
from autotune.decide.knob_space import Levels, knob_space, with_dealt_rows
from autotune.errors import DoesNotFit
from autotune.search.estimate import CannotTrace, EstimateRequest, estimate_model, predicted_rows
from autotune.search.exploration import Exploration
from autotune.search.exploration_evidence import evidence
from autotune.search.exploration_proof import Explored, prove_one_of
from autotune.search.exploration_windows import ExploreRequest
from autotune.search.probe import ProbeRequest, room_of
from autotune.search.profiles import StoredProfile, report_directory, with_exploration
from autotune.search.workers import SweepRequest
from autotune.store import write_atomically
from autotune.tuning.bench import Bench, check_belongs
from autotune.tuning.probe import Places, ProbeAsked, prepare, probe_request, probed_profile
from trainer.batch import RowStatistics, row_statistics
from trainer.config import Checkpointing, Layout, Precision, TrainConfig
from trainer.dataset import Manifest, TokenDataset
from trainer.families import FAMILIES

Value = TypeVar("Value")
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
LAYOUTS: tuple[Layout, ...] = ("packed", "bucketed", "padded")
COMPILERS = {"cpu": ("g++", "c++", "clang++"), "cuda": ("gcc", "cc", "clang")}
"""One of which ``torch.compile`` needs: for the kernels themselves, or for what starts Triton's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreAsked:
    """How settings are to be explored."""

    probe: ProbeAsked
    """As the profile was probed: what the user fixed there is not explored."""
    minutes: float
    most_trials: int = 60
    window_s: float = WINDOW_S


def explore_settings(
    bench: Bench, stored: StoredProfile, asked: ExploreAsked, manifest: Manifest
) -> tuple[StoredProfile, ExploreEvidence]:
    """Search, and write what was found; settings that are proven to be faster are probed and taken.

    Returns:
        The profile as it is now, and what was found.

    Raises:
        ProfileRefused: If the profile is of another machine, model or dataset.
        Undecided: If the unexplored settings could not be measured.
    """
    train = stored.profile.train
    fingerprint = bench.fingerprint(train.model, manifest)
    check_belongs(stored, fingerprint)
    probing = probe_request(bench, asked.probe, train.model, manifest)
    search_request = explore_request(bench, stored, asked, probing, manifest)
    ledger = report_directory(stored.path, asked.probe.reports) / "ledger"
    with bench.display.show(f"explore {train.model.name}", most_s=60 * asked.minutes) as update:
        runner = bench.runner(ledger, fingerprint, update, expected_trials=_USUAL_WINDOWS)
        search = Exploration(request=search_request, runner=runner)
        explored = search.run()
    profile, explored = _settle(bench, stored, asked.probe, search, explored, manifest=manifest)
    found = evidence(search, explored)
    profile = with_exploration(profile, found, runner)
    write_atomically(stored.path, profile_to_toml(profile))
    return replace(stored, profile=profile, intact=True), found


_USUAL_WINDOWS = 40


def _settle(
    bench: Bench,
    stored: StoredProfile,
    asked: ProbeAsked,
    search: Exploration,
    explored: Explored,
    *,
    manifest: Manifest,
) -> tuple[Profile, Explored]:
    """Probe what is to be taken, so that its memory is proven as the unexplored one's was.

    Where only fewer rows leave the headroom free, these have to be proven to be faster as well.

    Returns:
        The profile to write, and what is taken.
    """
    if not explored.adopted:
        return stored.profile, explored
    chosen = explored.candidate
    try:
        probed = _probe_chosen(bench, stored, asked, chosen, manifest)
    except DoesNotFit as error:
        return stored.profile, replace(explored, adopted=False, refused=error.message)
    assert probed.evidence.probe is not None
    most = rows_with_headroom(probed.evidence.probe.feasible_max, probed.constraints.headroom_share)
    if chosen.micro_batch_rows > most:
        ranks = search.request.windows.limits.local_ranks
        fewer = with_dealt_rows(replace(chosen, micro_batch_rows=most), search.request.global_rows, ranks)
        if fewer == search.unexplored:
            why = f"no more than {most} rows leave the headroom free, and with these it is the unexplored settings"
            return stored.profile, replace(explored, adopted=False, refused=why)
        search.known.consider(fewer)
        again = prove_one_of([fewer], search.known, search.reading)
        told = again.equal_loss or explored.equal_loss
        explored = replace(again, equal_loss=told, passed_over=explored.passed_over)
    if not explored.adopted:
        return stored.profile, explored
    train = probed.train.model_copy(update={"micro_batch_rows": explored.candidate.micro_batch_rows})
    return probed.model_copy(update={"train": train}), explored


def explore_request(
    bench: Bench, stored: StoredProfile, asked: ExploreAsked, probing: ProbeRequest, manifest: Manifest
) -> ExploreRequest:
    """The space around a profile's settings, and what its windows need.

    Args:
        bench: Where it is measured.
        stored: The profile as probed.
        asked: How settings are to be explored.
        probing: How the profile was probed.
        manifest: Of the dataset.
    """
    train, constraints = stored.profile.train, stored.profile.constraints
    ranks = probing.local_ranks
    levels, left_out = _levels(bench, train, asked.probe)
    with contextlib.closing(TokenDataset.open(asked.probe.data)) as dataset:
        rows = {
            layout: row_statistics(train.model_copy(update={"layout": layout}), dataset) for layout in levels.layout
        }
    tokens = constraints.global_batch_tokens
    global_rows = {layout: global_batch_rows(tokens, one.mean_real_tokens) for layout, one in rows.items()}
    cells = knob_space(Knobs.of(train), levels, global_rows, ranks, lambda knobs: asked.probe.max_rows)
    width = train.seq_length_tokens
    windows = SweepRequest(
        config=train,
        data_dir=str(asked.probe.data.resolve()),
        limits=bench.loader_limits(train, manifest, ranks, None),
        window_s=asked.window_s,
        budget_s=60 * asked.minutes,
        trial_timeout_s=asked.probe.trial_timeout_s,
        storage=bench.storage(asked.probe.data),
    )
    return ExploreRequest(
        windows=windows,
        cells=cells,
        global_rows=global_rows,
        real_shares={
            layout: None if layout == "bucketed" else one.mean_real_tokens / width for layout, one in rows.items()
        },
        most_trials=asked.most_trials,
        left_out=tuple(left_out),
        fits=_fits(bench, probing, rows, constraints.headroom_share),
    )


def _levels(bench: Bench, train: TrainConfig, asked: ProbeAsked) -> tuple[Levels, list[str]]:
    """The values of each knob, the profile's first; and what is left out, with the reason."""
    left_out = []
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    if asked.precision is not None:
        left_out.append(f"precision: {train.precision} was asked for")
        precisions = (train.precision,)
    layouts = LAYOUTS
    if asked.layout is not None:
        left_out.append(f"layout: {train.layout} was asked for")
        layouts = (train.layout,)
    elif train.model.config["model_type"] not in FAMILIES:
        left_out.append("layout: packed rows need a model whose attention this project knows")
        layouts = ("padded", "bucketed")
    compiled: tuple[bool, ...] = (False, True)
    compilers = COMPILERS[bench.site.device]
    if not any(map(shutil.which, compilers)):
        left_out.append(f"compile_layers: there is no compiler here ({', '.join(compilers)})")
        compiled = (train.compile_layers,)
    if bench.site.device == "cpu":
        left_out.append("attention: a CPU has no varlen kernel")
    levels = Levels(
        precision=_first(train.precision, precisions),
        attention=("auto", "sdpa") if bench.site.device == "cuda" else (train.attention,),
        checkpointing=_first(train.checkpointing, CHECKPOINTING),
        compile_layers=_first(train.compile_layers, compiled),
        layout=_first(train.layout, layouts),
    )
    return levels, left_out


def _first(one: Value, every: tuple[Value, ...]) -> tuple[Value, ...]:
    return (one, *(other for other in every if other != one))


def _fits(
    bench: Bench, probing: ProbeRequest, rows: dict[Layout, RowStatistics], headroom_share: float
) -> Callable[[Knobs], bool]:
    """Whether a cell is predicted to leave the headroom free; one that cannot be predicted is tried."""
    known: dict[Knobs, int | None] = {}

    def fits(knobs: Knobs) -> bool:
        kind = replace(knobs, micro_batch_rows=1)
        if kind not in known:
            known[kind] = _predicted_most(bench, probing, rows[knobs.layout], knobs)
        most = known[kind]
        return most is None or knobs.micro_batch_rows <= rows_with_headroom(most, headroom_share)

    return fits


def _predicted_most(bench: Bench, probing: ProbeRequest, rows: RowStatistics, knobs: Knobs) -> int | None:
    if probing.expected is None:
        return None
    settings = knobs.settings() | {"micro_batch_rows": 1}
    config = TrainConfig.model_validate(
        {
            "model": probing.settings,
            "seq_length_tokens": probing.seq_length_tokens,
            "attention_dropout": probing.attention_dropout,
            "device": probing.device,
            "global_batch_rows": probing.local_ranks * probing.micro_batches,
            **settings,
        }
    )
    request = EstimateRequest(
        config=config,
        vocab_size=probing.manifest.vocab_size,
        special_ids=probing.manifest.special_ids,
        documents_per_row=rows.most_documents if knobs.layout == "packed" else 1.0,
        micro_batches=probing.micro_batches,
        ranks=probing.local_ranks,
    )
    try:
        found = estimate_model(request, bench.machine, room_of(probing))
    except CannotTrace:
        return None
    return predicted_rows(found, probing.memory_budget_bytes, probing.expected.usual, max_rows=probing.max_rows)


def _probe_chosen(bench: Bench, stored: StoredProfile, asked: ProbeAsked, chosen: Knobs, manifest: Manifest) -> Profile:
    """What a probe says of chosen settings, at the micro-batch that it would take by itself; nothing is written."""
    again = replace(
        asked,
        layout=chosen.layout,
        attention=chosen.attention,
        precision=chosen.precision,
        checkpointing=chosen.checkpointing,
        compile_layers=chosen.compile_layers,
        strategy=stored.profile.train.parallel.strategy,
        global_batch_tokens=stored.profile.constraints.global_batch_tokens,
    )
    ready = prepare(bench, again, stored.profile.train.model, manifest)
    profile, _ = probed_profile(bench, ready, Places(asked.data, stored.path, asked.reports))
    assert profile.evidence.probe is not None
    probe = profile.evidence.probe.model_copy(update={"choice": "explored together with other settings of the step"})
    return profile.model_copy(update={"evidence": profile.evidence.model_copy(update={"probe": probe})})
