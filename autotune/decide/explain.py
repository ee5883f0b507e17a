"""Why each setting of a profile is what it is: measured, asked for, or left at its default. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotune.core.advice import Figure
from autotune.core.evidence import ExchangeRow, NetworkEvidence, ProbeEvidence, WorkersEvidence
from autotune.core.profile import Profile
from autotune.decide.choose import choose_micro_batch, global_batch_rows
from autotune.decide.explored import Explored, explored_setting
from autotune.errors import BadInput
from trainer.config import DataSettings, Tag, TrainConfig, dotted, tagged
from trainer.schema import nearest

Origin = Literal["measured", "allocator", "constraint", "asked for", "default", "changed"]
"""``measured``: decided by figures. ``allocator``: by sizes on a pretended GPU. ``constraint``: follows from what the
user set. ``asked for``: given to the measurements, whose figures hold for it alone. ``default``: the trainer's.
``changed``: none of these says so; it was edited, or written by advice."""

_PROBED_WITH = tagged(TrainConfig, Tag.PROBED)
_OF_EXCHANGE = ("strategy", "shard_ranks", "bucket_cap_mib", "gradient_dtype")
_OF_LOADER = tagged(DataSettings, Tag.LOADER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One setting, and why."""

    key: str
    """Dotted, without ``train``."""
    value: Any
    origin: Origin
    because: str
    evidence: tuple[Figure, ...] = ()
    rejected: tuple[str, ...] = ()
    """What else was measured, and what spoke against it."""
    meaning: str | None = None


def explanations(profile: Profile) -> tuple[Explanation, ...]:
    """Every setting of a profile with its reason, in the order of the schema."""
    values = dotted(profile.train.model_dump(mode="json"))
    defaults = dotted(TrainConfig(model=profile.train.model).model_dump(mode="json"))
    return tuple(_explain(profile, key, value, defaults[key]) for key, value in values.items())


def meaning_of(key: str) -> str | None:
    """Return what the schema says under a setting, in one line; None under a key of the model's own config.

    Args:
        key: Dotted, without ``train``.
    """
    table: Any = TrainConfig
    description: str | None = None
    for part in key.split("."):
        field = getattr(table, "model_fields", {}).get(part)
        table, description = (field.annotation, field.description) if field else (None, None)
    return description and " ".join(description.split())


def of_key(found: Sequence[Explanation], key: str) -> tuple[Explanation, ...]:
    """Those of one setting, or of a group such as ``data``; ``train.`` before it may be left out.

    Raises:
        BadInput: If there is no such setting; the nearest is suggested.
    """
    name = key.removeprefix("train.")
    chosen = tuple(one for one in found if one.key == name or one.key.startswith(f"{name}."))
    if chosen:
        return chosen
    known = [one.key for one in found]
    match = nearest(name, known) or nearest(name, [one.rpartition(".")[2] for one in known])
    whole = next((one for one in known if match in (one, one.rpartition(".")[2])), None)
    raise BadInput(
        f"there is no setting {key[:80]!r}",
        next_step=f"Did you mean {whole!r}?" if whole else "All settings with their reasons: leave out the key.",
    )


def _explain(profile: Profile, key: str, value: object, default: object) -> Explanation:
    evidence = profile.evidence
    table, _, name = key.rpartition(".")
    explored = _of_exploring(profile, key)
    if explored is not None:
        found = _explored(profile, explored, key, value)
    elif key == "micro_batch_rows" and evidence.probe is not None:
        found = _micro_batch(profile, evidence.probe)
    elif key == "global_batch_rows" and evidence.probe is not None:
        found = _global_batch(profile, evidence.probe.mean_real_tokens_per_row)
    elif table == "data" and name in _OF_LOADER and evidence.workers is not None and _swept(evidence.workers, name):
        found = _loader(profile, evidence.workers, name)
    elif table == "parallel" and name in _OF_EXCHANGE and evidence.network is not None and evidence.network.exchanges:
        found = _exchange(profile, evidence.network, key, value)
    else:
        found = _given(profile, key, value, default)
    return replace(found, key=key, value=value, meaning=meaning_of(key))


def _found(origin: Origin, because: str, evidence: Sequence[Figure] = (), rejected: Sequence[str] = ()) -> Explanation:
    return Explanation(
        key="", value=None, origin=origin, because=because, evidence=tuple(evidence), rejected=tuple(rejected)
    )


def _of_exploring(profile: Profile, key: str) -> Explored | None:
    """What an exploration says of a setting; None where it was not explored, or where others decided it since."""
    found, network = profile.evidence.explore, profile.evidence.network
    if found is None:
        return None
    if key == "micro_batch_rows":
        dealt = network is not None and any(row.rows == profile.train.micro_batch_rows for row in network.exchanges)
        if dealt or not found.adopted:
            return None
    return explored_setting(found, key)


def _explored(profile: Profile, found: Explored, key: str, value: object) -> Explanation:
    figures, probe = found.figures, profile.evidence.probe
    if key == "micro_batch_rows" and probe is not None:
        figures = (*figures, *_micro_batch(profile, probe).evidence)
    if found.chosen == value:
        return _found("measured", found.because, figures, found.rejected)
    return _found("changed", f"{found.chosen} was chosen; {found.because}", figures, found.rejected)


def _given(profile: Profile, key: str, value: object, default: object) -> Explanation:
    if key in ("model.name", "model.config", "model.null_keys"):
        return _found("constraint", "the model that was asked for; another one is refused")
    if key in ("data.path", "data.dataset_hash"):
        return _found("constraint", "the dataset that was asked for; another one is refused")
    decides = profile.evidence.probe is not None and key in _PROBED_WITH
    if value == default:
        return _found("default", f"the trainer's default{', and all figures were measured with it' if decides else ''}")
    if decides:
        return _found("asked for", "an option of the probe, or what it took for this device; all figures hold for it")
    return _found("changed", f"the default is {default}; nothing that was measured decides it, so somebody set it")


def _micro_batch(profile: Profile, probe: ProbeEvidence) -> Explanation:
    rows = profile.train.micro_batch_rows
    curve = {point.rows: point for point in probe.curve}
    best = max(probe.curve, key=lambda point: point.slot_tokens_per_s, default=None)
    figures = [
        Figure.of(
            point.slot_rate,
            name=f"slot tokens/s at {_many(point.rows, 'row')}",
            unit="tokens/s",
            n=point.timed_steps,
            source="evidence.probe.sustained" if point is probe.sustained else "evidence.probe.curve",
        )
        for point in dict.fromkeys(one for one in (probe.promised(rows), curve.get(rows), best) if one is not None)
    ]
    figures += [
        Figure(
            name="largest that fits",
            value=probe.feasible_max,
            unit="rows",
            known=profile.fingerprint.bytes_known,
            source="evidence.probe.feasible_max",
        ),
        Figure(
            name="its peak",
            value=probe.feasible_peak_bytes,
            unit="bytes",
            known=profile.fingerprint.bytes_known,
            source="evidence.probe.feasible_peak_bytes",
        ),
        Figure(
            name="memory budget",
            value=profile.constraints.memory_budget_bytes,
            unit="bytes",
            known="assumed",
            source="constraints",
        ),
    ]
    rejected = [] if best is None else [_against(point.rows, point.slot_tokens_per_s, best.rows, best.slot_tokens_per_s)
                                        for point in probe.curve if point.rows != rows]  # fmt: skip
    if probe.infeasible_min is not None:
        rejected.append(f"{probe.infeasible_min} rows: refused for want of memory")
    if not probe.curve:
        return _found(profile.fingerprint.bytes_known, probe.choice, figures, rejected)
    chosen = choose_micro_batch(
        probe.curve, probe.feasible_max, global_rows=profile.train.global_batch_rows, ranks=probe.local_ranks
    ).rows
    if rows == chosen:
        return _found("measured", probe.choice, figures, rejected)
    network = profile.evidence.network
    if network is not None and any(row.rows == rows for row in network.exchanges):
        because = f"how the chosen exchange of gradients deals the global batch; the probe chose {chosen} rows"
        return _found("measured", because, figures, rejected)
    return _found("changed", f"{chosen} rows were measured to be the best choice: {probe.choice}", figures, rejected)


def _against(rows: int, rate: float, best_rows: int, best_rate: float) -> str:
    if rows == best_rows:
        return f"{_many(rows, 'row')}: the fastest that was measured"
    return f"{_many(rows, 'row')}: {rate / best_rate:.1%} of the fastest, {_many(best_rows, 'row')}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _global_batch(profile: Profile, tokens_per_row: float) -> Explanation:
    tokens = profile.constraints.global_batch_tokens
    rows = global_batch_rows(tokens, tokens_per_row)
    figures = [
        Figure(name="real tokens in a row, mean", value=tokens_per_row, unit="tokens", source="evidence.probe"),
        Figure(name="global batch", value=tokens, unit="tokens", known="assumed", source="constraints"),
    ]
    asked = f"the {tokens:,} real tokens that were asked for"
    if profile.train.global_batch_rows == rows:
        return _found("constraint", f"{rows} rows hold {asked}", figures)
    return _found("changed", f"{rows} rows would hold {asked}", figures)


def _swept(found: WorkersEvidence, name: str) -> bool:
    return name == "loader_workers" or (found.joint is not None and found.joint.adopted)


def _loader(profile: Profile, found: WorkersEvidence, name: str) -> Explanation:
    joint = found.joint if found.joint is not None and found.joint.adopted else None
    expected = found.chosen if joint is None else getattr(joint, name)
    because = found.choice
    figures = [
        Figure.of(
            row.ratio,
            name=f"of the ceiling, {_many(row.loader_workers, 'worker')}",
            unit="ratio",
            n=len(row.slot_tokens_per_s),
            source="evidence.workers.rows",
        )
        for row in found.rows
        if row.loader_workers == found.chosen
    ]
    rejected = [
        f"{_many(row.loader_workers, 'worker')}: {row.ratio_to_ceiling:.1%} of the ceiling, {_WORDS[row.verdict]}"
        for row in found.rows
        if row.loader_workers != found.chosen
    ]
    if found.refusal:
        rejected.append(found.refusal)
    if joint is not None:
        because = "a search over workers, prefetching and pinning together found it to be faster"
        figures.append(
            Figure.of(
                joint.ratio, name="to workers alone", unit="ratio", n=joint.trials, source="evidence.workers.joint"
            )
        )
    if getattr(profile.train.data, name) == expected:
        return _found("measured", because, figures, rejected)
    return _found("changed", f"{expected} was measured to be the best choice: {because}", figures, rejected)


_WORDS = {"proven": "enough", "refuted": "too few", "open": "not decided"}


def _exchange(profile: Profile, found: NetworkEvidence, key: str, value: object) -> Explanation:
    parallel = profile.train.parallel
    mine = [row for row in found.exchanges if all(getattr(row, one) == getattr(parallel, one) for one in _OF_EXCHANGE)]
    figures = [_step(row) for row in mine if row.real_tokens_per_s is not None]
    rejected = [
        f"{_exchange_name(row)}: {'n/a' if row.real_tokens_per_s is None else f'{row.real_tokens_per_s:,.0f}'} "
        f"real tokens/s, {row.outcome}"
        for row in found.exchanges
        if row not in mine
    ]
    if mine:
        return _found("measured", found.choice, figures, rejected)
    because = f"no exchange that was measured has {key} = {value} with the settings beside it; then: {found.choice}"
    return _found("changed", because, figures, rejected)


def _step(row: ExchangeRow) -> Figure:
    assert row.real_tokens_per_s is not None  # the caller has looked
    return Figure(
        name=f"real tokens/s, {_exchange_name(row)}",
        value=row.real_tokens_per_s,
        unit="tokens/s",
        n=row.steps,
        source="evidence.network.exchanges",
    )


def _exchange_name(row: ExchangeRow) -> str:
    kind = row.strategy if row.shard_ranks is None else "hsdp"
    return f"{kind}, {row.gradient_dtype}, {row.bucket_cap_mib} MiB, {row.micro_batches} micro-batches"
