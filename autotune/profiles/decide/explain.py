"""Explanation of each setting of a profile. Pure.

A setting was measured, set by you, or left at its default.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotune.advice.values import EvidenceFigure, figure
from autotune.base.units import format_share
from autotune.base.wording import plural
from autotune.errors import BadInput
from autotune.memory.values import LOWER_BOUND, CurvePoint, ProbeEvidence
from autotune.network.values import GradientSyncRow, NetworkEvidence
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    global_batch_size_of,
    split_global_batch,
)
from autotune.profiles.decide.micro_batch import choose_micro_batch
from autotune.profiles.values import Profile
from autotune.search.values import KNOBS, Configuration, ExploredRow
from autotune.workers.values import VERDICT_WORDS, WorkersEvidence, WorkersRow
from trainer.config.tables import nearest
from trainer.config.train_config import (
    DataSettings,
    ParallelSettings,
    Tag,
    TrainConfig,
    dotted,
    tagged,
)

Origin = Literal[
    "measured", "allocator", "constraint", "requested", "default", "changed"
]
"""Origin of a setting. ``measured``: decided by measurements. ``allocator``: decided by
memory on a pretended GPU. ``constraint``: follows from your input. ``requested``: an
option, for which alone the figures hold. ``default``: the trainer's. ``changed``: none
of these, edited by hand or by ``autotune advise``."""

_PROBED_SETTINGS = tagged(TrainConfig, Tag.PROBED)
_GRADIENT_SYNC_SETTINGS = (
    "strategy",
    "shard_ranks",
    "bucket_cap_mib",
    "gradient_dtype",
)
_LOADER_SETTINGS = tagged(DataSettings, Tag.LOADER)
_SUBJECT_OF_SETTING = {
    "model.name": "model",
    "model.config": "model",
    "model.null_keys": "model",
    "data.path": "dataset",
    "data.dataset_hash": "dataset",
}
"""What the user tuned for, by the setting that names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A setting with its value, its origin and the reason for it."""

    key: str = ""
    """Dotted name, without ``train``."""
    value: Any = None
    origin: Origin
    because: str
    evidence: tuple[EvidenceFigure, ...] = ()
    rejected: tuple[str, ...] = ()
    """Alternatives that were measured, and the reasons against them."""
    meaning: str | None = None


def explanations(profile: Profile) -> tuple[Explanation, ...]:
    """Return every setting of a profile with its reason, in the order of the schema."""
    train = profile.train
    values = dotted(train.model_dump(mode="json"))
    defaults = dotted(TrainConfig(model=train.model).model_dump(mode="json"))
    return tuple(
        replace(
            _explain(profile, key, value, defaults[key]),
            key=key,
            value=value,
            meaning=meaning_of(key),
        )
        for key, value in values.items()
    )


def meaning_of(key: str) -> str | None:
    """Return the schema's description of a dotted key, on one line.

    None for a key of the model's own config.
    """
    table: Any = TrainConfig
    description: str | None = None
    for part in key.split("."):
        field = getattr(table, "model_fields", {}).get(part)
        if field is None:
            return None
        table = field.annotation
        description = field.description
    return description and " ".join(description.split())


def select_explanations(
    all_explanations: Sequence[Explanation], key: str
) -> tuple[Explanation, ...]:
    """Return explanations of a setting, or of a group such as ``data``.

    Raises:
        BadInput: If it is unknown.
    """
    name = key.removeprefix("train.")
    selected = tuple(
        explanation
        for explanation in all_explanations
        if explanation.key == name or explanation.key.startswith(f"{name}.")
    )
    if selected:
        return selected
    suggestion = _nearest_key(name, [known.key for known in all_explanations])
    raise BadInput(
        f"unknown setting {key[:80]!r}",
        next_step=(
            "Omit the key to list all settings with their reasons."
            if suggestion is None
            else f"Did you mean {suggestion!r}?"
        ),
    )


def _nearest_key(name: str, keys: Sequence[str]) -> str | None:
    """Return the dotted key closest to a misspelt one, or to its last part."""
    match = nearest(name, list(keys))
    if match is None:
        match = nearest(name, [_last_part(key) for key in keys])
    for key in keys:
        if match in (key, _last_part(key)):
            return key
    return None


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _explain(profile: Profile, key: str, value: object, default: object) -> Explanation:
    """Explain a setting by the evidence that decided it.

    Its key, value and meaning are left out.
    """
    evidence = profile.evidence
    explored = _explain_explored(profile, key, value)
    if explored is not None:
        return explored
    if key == "micro_batch_size" and evidence.probe is not None:
        return _explain_micro_batch(profile, evidence.probe)
    if key == "global_batch_size" and evidence.probe is not None:
        tokens_per_sequence = evidence.probe.mean_tokens_per_sequence
        return _explain_global_batch(profile, tokens_per_sequence)
    table, _, name = key.rpartition(".")
    if evidence.workers is not None and table == "data":
        joint = evidence.workers.joint
        is_searched = joint is not None and joint.adopted and name in _LOADER_SETTINGS
        if name == "num_workers" or is_searched:
            return _explain_loader(profile, evidence.workers, name)
    is_gradient_sync = table == "parallel" and name in _GRADIENT_SYNC_SETTINGS
    if evidence.network is not None and is_gradient_sync:
        return _explain_gradient_sync(profile, evidence.network, key, value)
    return _explain_given(profile, key, value, default)


def _is_split(profile: Profile) -> bool:
    """Return whether network tuning chose the micro-batch size.

    It does so by its split of the global batch.
    """
    network = profile.evidence.network
    if network is None:
        return False
    sizes = [row.micro_batch_size for row in network.gradient_syncs]
    return profile.train.micro_batch_size in sizes


def _explain_explored(profile: Profile, key: str, value: object) -> Explanation | None:
    """Explain a setting by an exploration.

    Returns:
        None if that tried one value only, or a later command decided it.
    """
    explore = profile.evidence.explore
    probe = profile.evidence.probe
    if explore is None or key not in KNOBS:
        return None
    # The starting configuration has the probe's choice, and network tuning runs later.
    if key == "micro_batch_size" and (not explore.adopted or _is_split(profile)):
        return None
    rows_by_value: dict[object, list[ExploredRow]] = {}
    for row in explore.rows:
        rows_by_value.setdefault(getattr(row.settings, key), []).append(row)
    if len(rows_by_value) < 2:
        return None
    figures: list[EvidenceFigure] = []
    if explore.candidate != explore.starting:
        name = f"{explore.candidate.name}, relative to the starting configuration"
        figures.append(figure(name, explore.ratio, "ratio", "evidence.explore"))
    if key == "micro_batch_size" and probe is not None:
        figures += _explain_micro_batch(profile, probe).evidence
    chosen = getattr(explore.chosen, key)
    because = f"joint search of the step's settings: {explore.choice}"
    if chosen != value:
        because = f"{chosen} was chosen; {because}"
    return Explanation(
        origin="measured" if chosen == value else "changed",
        evidence=tuple(figures),
        because=because,
        rejected=tuple(
            _best_with(other, rows, explore.starting)
            for other, rows in rows_by_value.items()
            if other != chosen
        ),
    )


def _best_with(
    value: object, rows: Sequence[ExploredRow], starting: Configuration
) -> str:
    """Return the best configuration with a value of a setting, in words.

    Args:
        value: Another value of the setting than the chosen one.
        rows: Configurations with this value.
        starting: Configuration that all were compared with.
    """
    shown = str(value).lower() if isinstance(value, bool) else value
    all_ratios = {row.settings.name: row.ratio_to_starting for row in rows}
    if any(row.settings == starting for row in rows):
        # The others were compared with it, so it has no ratio of its own.
        all_ratios[starting.name] = 1.0
    ratios = {name: ratio for name, ratio in all_ratios.items() if ratio is not None}
    if not ratios:
        outcomes = dict.fromkeys(row.outcome for row in rows)
        return f"{shown}: {', '.join(outcomes)}"
    best = max(ratios, key=lambda name: ratios[name])
    if best == starting.name:
        return (
            f"{shown}: no configuration with it was faster than the starting one, which"
            " has it"
        )
    return (
        f"{shown}: at best {ratios[best]:.3f} times the starting configuration, with"
        f" {best}"
    )


def _explain_given(
    profile: Profile, key: str, value: object, default: object
) -> Explanation:
    """Explain a setting that no measurement decided."""
    if key in _SUBJECT_OF_SETTING:
        subject = _SUBJECT_OF_SETTING[key]
        return Explanation(
            origin="constraint",
            because=f"the {subject} you tuned for; a different one is rejected",
        )
    is_probed = profile.evidence.probe is not None and key in _PROBED_SETTINGS
    if value == default:
        because = "the trainer's default"
        if is_probed:
            because += "; all figures were measured with it"
        return Explanation(origin="default", because=because)
    if is_probed:
        return Explanation(
            origin="requested",
            because=(
                "an option of the probe, or its default for this device; all figures"
                " hold only for it"
            ),
        )
    return Explanation(
        origin="changed",
        because=(
            f"set by hand or by autotune advise; the default is {default}, and no"
            " measurement decides it"
        ),
    )


def _explain_micro_batch(profile: Profile, probe: ProbeEvidence) -> Explanation:
    size = profile.train.micro_batch_size
    origin: Origin = profile.fingerprint.bytes_known
    chosen = size
    if probe.curve:
        # Chosen again from the curve, as the setting may have been edited since.
        origin = "measured"
        chosen = choose_micro_batch(
            probe.curve,
            probe.feasible_max,
            global_batch_size=profile.train.global_batch_size,
            ranks=probe.local_ranks,
        ).micro_batch_size
    because = probe.choice
    if size != chosen and _is_split(profile):
        because = (
            "split of the global batch by the chosen gradient synchronisation; the"
            f" probe chose {chosen}"
        )
    elif size != chosen:
        origin = "changed"
        because = f"{chosen} was measured to be the best choice: {probe.choice}"
    return Explanation(
        origin=origin,
        because=because,
        evidence=(
            *_throughput_figures(probe, size),
            *_memory_figures(profile, probe),
        ),
        rejected=tuple(_rejected_sizes(profile, probe, size)),
    )


def _throughput_figures(probe: ProbeEvidence, size: int) -> Iterator[EvidenceFigure]:
    """Yield the throughput at a micro-batch size and at the fastest one."""
    curve = {point.micro_batch_size: point for point in probe.curve}
    points = (probe.expected_throughput(size), curve.get(size), _fastest(probe))
    for point in dict.fromkeys(points):
        if point is None:
            continue
        part = "sustained" if point is probe.sustained else "curve"
        yield figure(
            f"tokens/s with padding at micro-batch size {point.micro_batch_size}",
            point.padded_rate,
            "tokens/s",
            f"evidence.probe.{part}",
            n=point.timed_steps,
        )


def _fastest(probe: ProbeEvidence) -> CurvePoint | None:
    return max(probe.curve, key=lambda point: point.padded_tokens_per_s, default=None)


def _memory_figures(
    profile: Profile, probe: ProbeEvidence
) -> tuple[EvidenceFigure, ...]:
    known = profile.fingerprint.bytes_known
    budget_bytes = profile.constraints.memory_budget_bytes
    return (
        figure(
            "largest that fits",
            probe.feasible_max,
            "sequences",
            "evidence.probe.feasible_max",
            known=known,
        ),
        figure(
            "its peak",
            probe.feasible_peak_bytes,
            "bytes",
            "evidence.probe.feasible_peak_bytes",
            known=known,
        ),
        figure("memory budget", budget_bytes, "bytes", "constraints", known="assumed"),
    )


def _rejected_sizes(profile: Profile, probe: ProbeEvidence, size: int) -> Iterator[str]:
    """Yield the other micro-batch sizes that were measured, with their rates.

    Sizes that the global batch is too small for are marked: they take the same steps.
    """
    fastest = _fastest(probe)
    ranks = probe.local_ranks
    global_batch_size = max(profile.train.global_batch_size, ranks)
    split = split_global_batch(global_batch_size, size, ranks)
    for point in probe.curve:
        if fastest is None or point.micro_batch_size == size:
            continue
        if split == split_global_batch(
            global_batch_size, point.micro_batch_size, ranks
        ):
            yield f"{point.micro_batch_size}: the same split, {split.words(ranks)}"
        elif point.micro_batch_size == fastest.micro_batch_size:
            yield f"{point.micro_batch_size}: the highest rate"
        else:
            share = point.padded_tokens_per_s / fastest.padded_tokens_per_s
            yield (
                f"{point.micro_batch_size}: {share:.1%} of the rate at"
                f" {fastest.micro_batch_size}"
            )
    if probe.infeasible_min is not None:
        yield f"{probe.infeasible_min}: out of memory"
    if probe.is_lower_bound:
        yield f"{probe.feasible_max}: {LOWER_BOUND}; larger sizes may fit"


def _explain_global_batch(profile: Profile, tokens_per_sequence: float) -> Explanation:
    tokens = profile.constraints.global_batch_tokens
    sequences = global_batch_size_of(tokens, tokens_per_sequence)
    is_followed = profile.train.global_batch_size == sequences
    is_default = tokens == DEFAULT_GLOBAL_BATCH_TOKENS
    hold = "hold" if is_followed else "would hold"
    origin_of_tokens = "the default" if is_default else "as you set"
    return Explanation(
        origin="constraint" if is_followed else "changed",
        because=(
            f"{plural(sequences, 'sequence')} {hold} {tokens:,} non-padding tokens,"
            f" {origin_of_tokens}"
        ),
        evidence=(
            figure(
                "non-padding tokens per sequence, average",
                tokens_per_sequence,
                "tokens",
                "evidence.probe",
            ),
            figure(
                "global batch",
                tokens,
                "tokens",
                "default" if is_default else "constraints",
                known="assumed",
            ),
        ),
    )


def _explain_loader(
    profile: Profile, workers: WorkersEvidence, name: str
) -> Explanation:
    """Explain a loader setting by the worker sweep and its joint search.

    Args:
        profile: Profile with the setting.
        workers: Evidence of the sweep.
        name: Field of ``DataSettings``.
    """
    figures = [
        _figure_of_count(row)
        for row in workers.rows
        if row.num_workers == workers.chosen
    ]
    rejected = [
        _rejected_count(row)
        for row in workers.rows
        if row.num_workers != workers.chosen
    ]
    if workers.next_smaller:
        rejected.append(workers.next_smaller)
    expected = workers.chosen
    because = workers.choice
    joint = workers.joint
    if joint is not None and joint.adopted:
        expected = getattr(joint, name)
        because = (
            "found to be faster by a joint search over workers, prefetch and pinning"
        )
        figures.append(
            figure(
                "relative to tuning workers alone",
                joint.ratio,
                "ratio",
                "evidence.workers.joint",
                n=joint.trials,
            )
        )
    # Settings may have been edited since the sweep.
    is_kept = getattr(profile.train.data, name) == expected
    if not is_kept:
        because = f"{expected} was measured to be the best choice: {because}"
    return Explanation(
        origin="measured" if is_kept else "changed",
        evidence=tuple(figures),
        rejected=tuple(rejected),
        because=because,
    )


def _figure_of_count(row: WorkersRow) -> EvidenceFigure:
    """Return the throughput with a number of workers, relative to cached batches."""
    return figure(
        f"throughput relative to cached batches, {plural(row.num_workers, 'worker')}",
        row.ratio,
        "share",
        "evidence.workers.rows",
        n=len(row.padded_tokens_per_s),
    )


def _rejected_count(row: WorkersRow) -> str:
    """Return the result of a number of workers that was not chosen, in words."""
    return (
        f"{plural(row.num_workers, 'worker')}: {format_share(row.ratio_to_cached)} of"
        f" the throughput on cached batches, {VERDICT_WORDS[row.verdict]}"
    )


def _explain_gradient_sync(
    profile: Profile, network: NetworkEvidence, key: str, value: object
) -> Explanation:
    """Explain a setting of gradient synchronisation by the measured configurations."""
    figures: list[EvidenceFigure] = []
    rejected: list[str] = []
    is_measured = False
    for row in network.gradient_syncs:
        if not _has_gradient_sync(profile.train.parallel, row):
            rejected.append(_rejected_gradient_sync(row))
            continue
        is_measured = True
        if row.tokens_per_s is not None:
            figures.append(
                figure(
                    f"non-padding tokens/s, {_gradient_sync_words(row)}",
                    row.tokens_per_s,
                    "tokens/s",
                    "evidence.network.gradient_syncs",
                    n=row.steps,
                )
            )
    because = network.choice
    if not is_measured:
        because = (
            f"no measured configuration has {key} = {value} with the other settings;"
            f" chosen was: {network.choice}"
        )
    return Explanation(
        origin="measured" if is_measured else "changed",
        because=because,
        evidence=tuple(figures),
        rejected=tuple(rejected),
    )


def _gradient_sync_words(row: GradientSyncRow) -> str:
    """Return the settings of a measured configuration, in words."""
    strategy = row.strategy if row.shard_ranks is None else "hsdp"
    split = f"{row.gradient_accumulation_steps} x {row.micro_batch_size} sequences"
    return (
        f"{strategy}, {row.gradient_dtype}, {row.bucket_cap_mib} MiB buckets, {split}"
    )


def _rejected_gradient_sync(row: GradientSyncRow) -> str:
    """Return the result of a configuration that was not chosen, in words."""
    rate = "n/a" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
    settings = _gradient_sync_words(row)
    return f"{settings}: {rate} non-padding tokens/s, {row.outcome}"


def _has_gradient_sync(parallel: ParallelSettings, row: GradientSyncRow) -> bool:
    """Return whether a measured row has the settings of a profile."""
    return all(
        getattr(row, name) == getattr(parallel, name)
        for name in _GRADIENT_SYNC_SETTINGS
    )
