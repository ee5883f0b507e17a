"""Explanation of each setting of a profile: measured, set by you, or left at its default. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotune.advice.values import EvidenceFigure, figure
from autotune.base.wording import plural
from autotune.errors import BadInput
from autotune.memory.values import ProbeEvidence
from autotune.network.values import NetworkEvidence
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    choose_micro_batch,
    global_batch_size_of,
)
from autotune.profiles.values import Profile
from autotune.search.values import KNOBS, Configuration, ExploredRow
from autotune.workers.values import VERDICT_WORDS, WorkersEvidence
from trainer.config.tables import nearest
from trainer.config.train_config import DataSettings, Tag, TrainConfig, dotted, tagged

Origin = Literal[
    "measured", "allocator", "constraint", "requested", "default", "changed"
]
"""Origin of a setting. ``measured``: decided by measurements. ``allocator``: decided by
memory on a pretended GPU. ``constraint``: follows from your input. ``requested``: an
option, for which alone the figures hold. ``default``: the trainer's. ``changed``: none
of these, edited by hand or by ``autotune advise``."""

_PROBED_WITH = tagged(TrainConfig, Tag.PROBED)
_OF_GRADIENT_SYNC = ("strategy", "shard_ranks", "bucket_cap_mib", "gradient_dtype")
_OF_LOADER = tagged(DataSettings, Tag.LOADER)
_ASKED_FOR = dict.fromkeys(("model.name", "model.config", "model.null_keys"), "model")
_ASKED_FOR |= dict.fromkeys(("data.path", "data.dataset_hash"), "dataset")


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
    values, defaults = (
        dotted(one.model_dump(mode="json"))
        for one in (train, TrainConfig(model=train.model))
    )
    return tuple(
        _explain(profile, key, value, defaults[key]) for key, value in values.items()
    )


def meaning_of(key: str) -> str | None:
    """Return the schema's description of a dotted key, on one line.

    None for a key of the model's own config.
    """
    table: Any = TrainConfig
    description: str | None = None
    for part in key.split("."):
        field = getattr(table, "model_fields", {}).get(part)
        table, description = (
            (field.annotation, field.description) if field else (None, None)
        )
    return description and " ".join(description.split())


def select_explanations(
    found: Sequence[Explanation], key: str
) -> tuple[Explanation, ...]:
    """Return explanations of a setting, or of a group such as ``data``.

    Raises:
        BadInput: If it is unknown.
    """
    name = key.removeprefix("train.")
    chosen = tuple(
        one for one in found if one.key == name or one.key.startswith(f"{name}.")
    )
    if chosen:
        return chosen
    known = [one.key for one in found]
    match = nearest(name, known) or nearest(
        name, [one.rpartition(".")[2] for one in known]
    )
    whole = next((one for one in known if match in (one, one.rpartition(".")[2])), None)
    next_step = (
        f"Did you mean {whole!r}?"
        if whole
        else "Omit the key to list all settings with their reasons."
    )
    raise BadInput(f"unknown setting {key[:80]!r}", next_step=next_step)


def _explain(profile: Profile, key: str, value: object, default: object) -> Explanation:
    evidence, (table, _, name) = profile.evidence, key.rpartition(".")
    joint = None if evidence.workers is None else evidence.workers.joint
    loads = table == "data" and (
        name == "num_workers"
        or (name in _OF_LOADER and joint is not None and joint.adopted)
    )
    if (explored := _explored(profile, key, value)) is not None:
        found = explored
    elif key == "micro_batch_size" and evidence.probe is not None:
        found = _micro_batch(profile, evidence.probe)
    elif key == "global_batch_size" and evidence.probe is not None:
        found = _global_batch(profile, evidence.probe.mean_tokens_per_sequence)
    elif loads and evidence.workers is not None:
        found = _loader(profile, evidence.workers, name)
    elif (
        table == "parallel"
        and name in _OF_GRADIENT_SYNC
        and evidence.network is not None
    ):
        found = _gradient_sync(profile, evidence.network, key, value)
    else:
        found = _given(profile, key, value, default)
    return replace(found, key=key, value=value, meaning=meaning_of(key))


def _is_split(profile: Profile) -> bool:
    """Return whether network tuning chose the micro-batch size, by its split of the global batch."""
    network, rows = profile.evidence.network, profile.train.micro_batch_size
    return network is not None and any(
        row.micro_batch_size == rows for row in network.gradient_syncs
    )


def _explored(profile: Profile, key: str, value: object) -> Explanation | None:
    """Explain a setting by an exploration.

    Return None if that tried one value only, or a later command decided it.
    """
    found, probe = profile.evidence.explore, profile.evidence.probe
    if found is None or key not in KNOBS:
        return None
    if key == "micro_batch_size" and (not found.adopted or _is_split(profile)):
        return None
    of_value: dict[object, list[ExploredRow]] = {}
    for row in found.rows:
        of_value.setdefault(getattr(row.settings, key), []).append(row)
    if len(of_value) < 2:
        return None
    name = f"{found.candidate.name}, relative to the starting configuration"
    is_other = found.candidate != found.starting
    figures = (
        [figure(name, found.ratio, "ratio", "evidence.explore")] if is_other else []
    )
    if key == "micro_batch_size" and probe is not None:
        figures += _micro_batch(profile, probe).evidence
    chosen, because = (
        getattr(found.chosen, key),
        f"joint search of the step's settings: {found.choice}",
    )
    return Explanation(
        origin="measured" if chosen == value else "changed",
        evidence=tuple(figures),
        because=because if chosen == value else f"{chosen} was chosen; {because}",
        rejected=tuple(
            _best_with(one, rows, found.starting)
            for one, rows in of_value.items()
            if one != chosen
        ),
    )


def _best_with(
    value: object, rows: Sequence[ExploredRow], starting: Configuration
) -> str:
    """Return the best configuration with another value, and its ratio to the starting configuration."""
    said = str(value).lower() if isinstance(value, bool) else value
    tried = {row.settings.name: row.ratio_to_starting for row in rows}
    if any(row.settings == starting for row in rows):
        tried[starting.name] = 1.0
    ratios = {name: ratio for name, ratio in tried.items() if ratio is not None}
    if not ratios:
        return f"{said}: {', '.join(dict.fromkeys(row.outcome for row in rows))}"
    name = max(ratios, key=lambda one: ratios[one])
    if name == starting.name:
        return (
            f"{said}: no configuration with it was faster than the starting one, which"
            " has it"
        )
    return (
        f"{said}: at best {ratios[name]:.3f} times the starting configuration, with"
        f" {name}"
    )


def _given(profile: Profile, key: str, value: object, default: object) -> Explanation:
    decides = profile.evidence.probe is not None and key in _PROBED_WITH
    origin: Origin = "changed"
    because = (
        f"set by hand or by autotune advise; the default is {default}, and no"
        " measurement decides it"
    )
    if key in _ASKED_FOR:
        origin, because = (
            "constraint",
            f"the {_ASKED_FOR[key]} you tuned for; a different one is rejected",
        )
    elif value == default:
        measured_with = "; all figures were measured with it" if decides else ""
        origin, because = "default", f"the trainer's default{measured_with}"
    elif decides:
        origin = "requested"
        because = (
            "an option of the probe, or its default for this device; all figures hold"
            " only for it"
        )
    return Explanation(origin=origin, because=because)


def _micro_batch(profile: Profile, probe: ProbeEvidence) -> Explanation:
    rows, known = profile.train.micro_batch_size, profile.fingerprint.bytes_known
    curve = {point.micro_batch_size: point for point in probe.curve}
    best = max(probe.curve, key=lambda point: point.padded_tokens_per_s, default=None)
    told = dict.fromkeys(
        one for one in (probe.promised(rows), curve.get(rows), best) if one is not None
    )
    budget_bytes = profile.constraints.memory_budget_bytes
    figures = []
    for point in told:
        name, source = (
            f"tokens/s with padding at micro-batch size {point.micro_batch_size}",
            "evidence.probe.",
        )
        source += "sustained" if point is probe.sustained else "curve"
        figures.append(
            figure(name, point.padded_rate, "tokens/s", source, n=point.timed_steps)
        )
    figures += [
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
    ]
    rejected = []
    for point in probe.curve:
        if point.micro_batch_size != rows and best is not None:
            share = (
                f"{point.padded_tokens_per_s / best.padded_tokens_per_s:.1%} of the"
                f" rate at {best.micro_batch_size}"
            )
            said = (
                "the highest rate"
                if point.micro_batch_size == best.micro_batch_size
                else share
            )
            rejected.append(f"{point.micro_batch_size}: {said}")
    if probe.infeasible_min is not None:
        rejected.append(f"{probe.infeasible_min}: out of memory")
    origin: Origin = known
    chosen, because = rows, probe.choice
    if probe.curve:
        batch, ranks = profile.train.global_batch_size, probe.local_ranks
        choice = choose_micro_batch(
            probe.curve, probe.feasible_max, global_batch_size=batch, ranks=ranks
        )
        origin, chosen = "measured", choice.micro_batch_size
    if rows != chosen and _is_split(profile):
        because = (
            "split of the global batch by the chosen gradient synchronisation; the"
            f" probe chose {chosen}"
        )
    elif rows != chosen:
        origin, because = (
            "changed",
            f"{chosen} was measured to be the best choice: {probe.choice}",
        )
    return Explanation(
        origin=origin,
        because=because,
        evidence=tuple(figures),
        rejected=tuple(rejected),
    )


def _global_batch(profile: Profile, tokens_per_sequence: float) -> Explanation:
    tokens = profile.constraints.global_batch_tokens
    rows = global_batch_size_of(tokens, tokens_per_sequence)
    follows, by_default = (
        profile.train.global_batch_size == rows,
        tokens == DEFAULT_GLOBAL_BATCH_TOKENS,
    )
    hold, whose = (
        "hold" if follows else "would hold",
        "the default" if by_default else "as you set",
    )
    evidence = (
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
            "default" if by_default else "constraints",
            known="assumed",
        ),
    )
    because = (
        f"{plural(rows, 'sequence')} {hold} {tokens:,} non-padding tokens, {whose}"
    )
    return Explanation(
        origin="constraint" if follows else "changed",
        because=because,
        evidence=evidence,
    )


def _loader(profile: Profile, found: WorkersEvidence, name: str) -> Explanation:
    expected, because, figures, rejected = found.chosen, found.choice, [], []
    for row in found.rows:
        count = plural(row.num_workers, "worker")
        if row.num_workers == found.chosen:
            against, n = (
                f"relative to cached batches, {count}",
                len(row.padded_tokens_per_s),
            )
            figures.append(
                figure(against, row.ratio, "ratio", "evidence.workers.rows", n=n)
            )
        else:
            share = f"{row.ratio_to_cached:.1%} of the rate with cached batches"
            rejected.append(f"{count}: {share}, {VERDICT_WORDS[row.verdict]}")
    if found.next_smaller:
        rejected.append(found.next_smaller)
    if (joint := found.joint) is not None and joint.adopted:
        expected = getattr(joint, name)
        because = (
            "found to be faster by a joint search over workers, prefetch and pinning"
        )
        alone = "relative to tuning workers alone"
        figures.append(
            figure(
                alone, joint.ratio, "ratio", "evidence.workers.joint", n=joint.trials
            )
        )
    kept = getattr(profile.train.data, name) == expected
    return Explanation(
        origin="measured" if kept else "changed",
        evidence=tuple(figures),
        rejected=tuple(rejected),
        because=(
            because
            if kept
            else f"{expected} was measured to be the best choice: {because}"
        ),
    )


def _gradient_sync(
    profile: Profile, found: NetworkEvidence, key: str, value: object
) -> Explanation:
    parallel = profile.train.parallel
    figures, rejected, because = [], [], found.choice
    origin: Origin = "changed"
    for row in found.gradient_syncs:
        kind, rate = (
            row.strategy if row.shard_ranks is None else "hsdp",
            row.tokens_per_s,
        )
        steps = plural(row.gradient_accumulation_steps, "accumulation step")
        way = f"{kind}, {row.gradient_dtype}, {row.bucket_cap_mib} MiB buckets, {steps}"
        if any(
            getattr(row, one) != getattr(parallel, one) for one in _OF_GRADIENT_SYNC
        ):
            rejected.append(
                f"{way}: {'n/a' if rate is None else f'{rate:,.0f}'} non-padding"
                f" tokens/s, {row.outcome}"
            )
            continue
        origin = "measured"
        if rate is not None:
            name = f"non-padding tokens/s, {way}"
            figures.append(
                figure(
                    name,
                    rate,
                    "tokens/s",
                    "evidence.network.gradient_syncs",
                    n=row.steps,
                )
            )
    if origin == "changed":
        because = (
            f"no measured configuration has {key} = {value} with the other settings;"
            f" chosen was: {found.choice}"
        )
    return Explanation(
        origin=origin,
        because=because,
        evidence=tuple(figures),
        rejected=tuple(rejected),
    )
