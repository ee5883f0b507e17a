"""Other trainers that a profile can be written for. Pure. A further one is a further row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.core.export import Export, Setting
from autotune.core.targets import Target
from autotune.decide.export import hf_trainer
from autotune.decide.export.subject import Rule, Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    written_for: str
    """Name and version of the other trainer."""
    rules: Sequence[Rule]


_TARGETS: Mapping[Target, _Known] = {
    "hf-trainer": _Known(written_for=hf_trainer.WRITTEN_FOR, rules=hf_trainer.RULES),
}


def export_to(target: Target, subject: Subject) -> Export:
    """All settings of a profile in the words of another trainer, and what these words cannot say."""
    known = _TARGETS[target]
    settings = tuple(one for rule in known.rules for one in rule(subject))
    arguments: dict[str, Setting] = {
        one.argument: one.value for one in settings if one.argument is not None and one.value is not None
    }
    return Export(
        target=target,
        written_for=known.written_for,
        model=subject.train.model.name,
        nodes=subject.nodes,
        ranks_per_node=subject.ranks_per_node,
        batch=subject.batch,
        arguments=arguments,
        settings=settings,
        warnings=tuple(_warnings(subject)),
    )


def _warnings(subject: Subject) -> list[str]:
    batch, found = subject.batch, []
    if subject.is_packed:
        found.append(_of_packing(subject))
    if batch.samples_per_microbatch_per_rank < batch.rows_per_microbatch_per_rank:
        found.append(
            f"micro-batches of {batch.samples_per_microbatch_per_rank} rather than "
            f"{batch.rows_per_microbatch_per_rank} rows: whole micro-batches of {batch.ranks} "
            f"{'rank' if batch.ranks == 1 else 'ranks'} come nearest to the global batch so"
        )
    found.append(
        "What fits was measured with this project's trainer. The other one computes the prediction head for every "
        "place and pads rows, so it may need more memory; nothing was measured with it."
    )
    return found


def _of_packing(subject: Subject) -> str:
    batch = subject.batch
    if batch.samples_per_row is None or batch.exported_fill_share is None:
        return (
            f"A packed row holds several samples, and how many is not known here ({batch.samples_per_row_source}): "
            "one for each row was taken, so a step of the export sees fewer real tokens than the profile's. Name the "
            "dataset with --data."
        )
    rows = batch.rows_per_microbatch_per_rank
    return (
        f"{rows} packed rows are not {rows} samples: a row holds {batch.samples_per_row:.2f} samples in the mean. The "
        f"export takes up to {rows} samples at once, each in a row of its own, and accumulates until a step has as "
        f"many real tokens. Padded to whole rows these are {batch.exported_fill_share:.0%} full instead of "
        f"{batch.fill_share or 0:.0%}, so the same tokens take about {batch.samples_per_row:.1f} times as many rows."
    )
