"""Answer ``autotune estimate``: which card, which settings, what fits, and what would fit otherwise."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autotune.core.cards import CARDS, RESERVE_BYTES, Card, card_of, find_card
from autotune.core.hardware import visible_devices
from autotune.core.rows import RowContents
from autotune.core.units import floor_gib, format_bytes, parse_bytes
from autotune.decide.memory import Ledger, ledger
from autotune.decide.sharding import Layout, ShardedBytes, fewest_that_share, shard, state_of_terms
from autotune.decide.surroundings import Expected, expected_on_cpu, expected_on_gpu
from autotune.errors import AutotuneError, BadInput, DoesNotFit, UsageError
from autotune.measure.machine import ForkServerMachine, Machine
from autotune.measure.nvml import NvmlMonitor
from autotune.search.estimate import (
    CannotTrace,
    Estimate,
    EstimateRequest,
    Room,
    estimate_model,
    predicted_rows,
    rows_range,
)
from autotune.search.row_contents import assumed_contents, contents_of
from autotune.show.estimate import Answer, Predicted, WhatIf
from trainer.config import Attention, Checkpointing, Head, ModelSettings, Precision, TrainConfig
from trainer.config import Layout as RowLayout
from trainer.families import FAMILIES
from trainer.progress import Update

_ONLY_ITS_OWN: tuple[Attention, ...] = ("auto",)
"""Encoders that this project does not know keep their own attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked for, beside the settings that alternatives vary."""

    models: tuple[ModelSettings, ...]
    gpu: str | None
    memory: str | None
    device: Literal["cuda", "cpu"]
    data: Path | None
    vocab_size: int
    """Without a dataset."""
    seq_length_tokens: int
    ranks: int
    accumulate: bool
    tensor_ranks: int
    pipeline_stages: int
    max_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Settings that alternatives vary."""

    layout: RowLayout | None
    """None: packed where this project knows the model's attention."""
    precision: Precision
    attention: Attention
    attention_dropout: float | None
    checkpointing: Checkpointing
    head: Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The card, or the memory of one."""

    name: str
    budget_bytes: int
    expected: Expected
    card: Card | None = None
    """None on a CPU, and where only an amount of memory was named."""
    reserve_bytes: int = 0
    """Of the card's memory, left out of the budget."""


def predict(asked: Asked, choices: Choices, target: Target, *, what_if: bool, update: Update) -> Answer:
    """Everything that the command shows; a model that does not fit, or can only be run, keeps no other from its answer.

    Raises:
        BadInput: If the model cannot be built.
        TrainerError: If the dataset is none.
    """
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        predicted: list[Predicted] = []
        refused: list[tuple[str, AutotuneError]] = []
        for number, model in enumerate(asked.models):
            update(number, len(asked.models), f"tracing {model.name}")
            try:
                predicted.append(_predict_one(asked, choices, model, target, machine))
            except (CannotTrace, DoesNotFit) as error:
                refused.append((model.name, error))
        what_ifs = tuple(_what_ifs(asked, choices, target, machine, update)) if what_if else ()
        traced_with = ", ".join(f"{library} {machine.versions.get(library)}" for library in ("torch", "transformers"))
    return Answer(
        target=target.name,
        reserve_bytes=target.reserve_bytes,
        predicted=tuple(predicted),
        refused=tuple(refused),
        what_ifs=what_ifs,
        traced_with=traced_with,
    )


def find_target(asked: Asked) -> Target:
    """The card that is meant, and how much of it may be used.

    Raises:
        BadInput: If there is no such card, or more is asked for than it has.
        UsageError: If nothing says how much memory there is.
    """
    budget = None if asked.memory is None else parse_bytes(asked.memory)
    if asked.device == "cpu":
        if budget is None or asked.gpu is not None:
            raise UsageError("a CPU needs a budget, and has no card", next_step="Try --device cpu --memory 2GiB.")
        return Target(name=f"a CPU with {format_bytes(budget)}", budget_bytes=budget, expected=expected_on_cpu())
    card = find_card(asked.gpu) if asked.gpu is not None else _card_here() if budget is None else None
    if card is None:
        if budget is None:
            raise UsageError(
                "there is no GPU here that is known by name, so the card has to be named",
                next_step=f"Use --gpu with one of {', '.join(one.key for one in CARDS)}; or --memory 24GiB.",
            )
        expected = expected_on_gpu(None, asked.ranks)
        return Target(name=f"a GPU with {format_bytes(budget)}", budget_bytes=budget, expected=expected)
    if budget is not None and budget > card.total_bytes:
        raise BadInput(
            f"--memory {asked.memory} ({format_bytes(budget)}) is more than {card.name} has: "
            f"{format_bytes(card.total_bytes)}",
            next_step=f"Ask for at most {floor_gib(card.total_bytes)}, or leave --memory out.",
        )
    return Target(
        name=card.name,
        budget_bytes=min(card.usable_bytes, budget or card.default_budget_bytes),
        reserve_bytes=0 if budget else RESERVE_BYTES,
        expected=expected_on_gpu(card.compute_capability, asked.ranks, card.usable_bytes),
        card=card,
    )


def _card_here() -> Card | None:
    monitor = NvmlMonitor()
    try:
        gpus = visible_devices(monitor.devices(), os.environ)
    finally:
        monitor.close()
    return card_of(gpus[0].name, gpus[0].total_bytes) if gpus else None


def _predict_one(asked: Asked, choices: Choices, model: ModelSettings, target: Target, machine: Machine) -> Predicted:
    config = config_of(asked, choices, model)
    rows_hold = contents(asked, config)
    estimate = estimate_model(_request(asked, config, rows_hold), machine, _room(asked, target))
    usual = target.expected.usual
    rows = predicted_rows(estimate, target.budget_bytes, usual, max_rows=asked.max_rows)
    if not rows:
        raise _does_not_fit(asked, choices, target, estimate, machine)
    found = ledger(estimate.law, rows, usual)
    low, high = rows_range(estimate, target.budget_bytes, target.expected, max_rows=asked.max_rows)
    return Predicted(
        config=config,
        parameters=estimate.parameters,
        attention=estimate.attention,
        attention_reason=estimate.attention_reason,
        budget_bytes=target.budget_bytes,
        rows=rows,
        rows_low=min(low, rows),
        rows_high=max(high, rows),
        ledger=found,
        per_row_bytes=_per_row(estimate, rows),
        contents=rows_hold,
        traces=estimate.traces,
        sharded=tuple(_shards(asked, estimate, found)),
        limited=rows == asked.max_rows,
    )


def _per_row(estimate: Estimate, rows: int) -> float:
    """On average between so many rows and twice as many: of few rows the peak may lie where rows do not count."""
    peaks = [float(estimate.law.running_bytes(count).max()) for count in (rows, 2 * rows)]
    return (peaks[1] - peaks[0]) / rows


def config_of(asked: Asked, choices: Choices, model: ModelSettings) -> TrainConfig:
    """The settings that are predicted for; batches are not among them."""
    known = model.config["model_type"] in FAMILIES
    return TrainConfig(
        model=model,
        seq_length_tokens=asked.seq_length_tokens,
        layout=choices.layout or ("packed" if known else "padded"),
        precision=choices.precision,
        attention=choices.attention,
        attention_dropout=choices.attention_dropout,
        checkpointing=choices.checkpointing,
        head=choices.head,
        device=asked.device,
    )


def _room(asked: Asked, target: Target) -> Room:
    return Room(budget_bytes=target.budget_bytes, surroundings=target.expected.usual, max_rows=asked.max_rows)


def _request(asked: Asked, config: TrainConfig, rows: RowContents) -> EstimateRequest:
    return EstimateRequest(
        config=config,
        vocab_size=rows.vocab_size,
        special_ids=rows.special_ids,
        documents_per_row=rows.documents,
        micro_batches=2 if asked.accumulate else 1,
        ranks=asked.ranks,
    )


def contents(asked: Asked, config: TrainConfig) -> RowContents:
    """What rows hold with these settings: of the dataset that is named, else assumed.

    Raises:
        TrainerError: If what is named is no dataset.
    """
    if asked.data is None:
        return assumed_contents(asked.vocab_size, config.layout, config.seq_length_tokens)
    return contents_of(asked.data, config.layout, config.seq_length_tokens)


def _does_not_fit(asked: Asked, choices: Choices, target: Target, estimate: Estimate, machine: Machine) -> DoesNotFit:
    """Say which term is the largest, and which single change would make a row fit."""
    found = ledger(estimate.law, 1, target.expected.usual)
    term, size = max(found.terms_bytes.items(), key=lambda item: item[1])
    model = estimate.request.config.model
    helps = []
    for name, changed in _single_changes(choices):
        rows, _ = _rows_or_why(asked, changed, model, target, machine)
        if rows:
            helps.append(f"{name} ({rows} rows)")
    advice = f"Predicted to fit with {' or '.join(helps)}." if helps else "No single setting is predicted to be enough."
    largest = int(estimate.law.largest_parameter_bytes)
    shared = fewest_that_share(found.terms_bytes, target.budget_bytes, largest_layer_bytes=largest)
    otherwise = ["more memory", "a shorter --seq-length", "a smaller --model"]
    otherwise += [] if shared is None else [f"a state that is shared by {shared.words}"]
    return DoesNotFit(
        f"not even one row of {asked.seq_length_tokens} tokens of {model.name} is predicted to fit "
        f"{format_bytes(target.budget_bytes)}: it needs {format_bytes(found.peak_bytes)}, of which {term} "
        f"{format_bytes(size)}",
        next_step=f"{advice} Otherwise: {', '.join(otherwise[:-1])}, or {otherwise[-1]}.",
    )


def _single_changes(choices: Choices) -> Iterator[tuple[str, Choices]]:
    if choices.precision == "fp32":
        yield "--precision bf16", replace(choices, precision="bf16")
    if choices.checkpointing != "full":
        yield "--checkpointing full", replace(choices, checkpointing="full")
    if choices.head == "dense":
        yield "--head masked", replace(choices, head="masked")


def _what_ifs(asked: Asked, choices: Choices, target: Target, machine: Machine, update: Update) -> Iterator[WhatIf]:
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    attentions: tuple[Attention, ...] = ("varlen", "sdpa") if asked.device == "cuda" else ("sdpa",)
    checkpointings: tuple[Checkpointing, ...] = ("none", "selective", "full")
    heads: tuple[Head, ...] = ("masked", "dense")
    layouts: tuple[RowLayout, ...] = ("packed", "padded")
    combinations = [
        (model, precision, attention, checkpointing, head)
        for model in asked.models
        for precision, attention, checkpointing, head in itertools.product(
            precisions, attentions if model.config["model_type"] in FAMILIES else _ONLY_ITS_OWN, checkpointings, heads
        )
        if (precision, attention) != ("fp32", "varlen")  # there is no such kernel
    ]
    for number, (model, precision, attention, checkpointing, head) in enumerate(combinations):
        update(number, len(combinations), f"what if: {model.name} {precision} {attention} {checkpointing} {head}")
        known = model.config["model_type"] in FAMILIES
        found: dict[bool, tuple[int | None, str]] = {}
        for layout in layouts if known else ("padded",):
            changed = replace(
                choices,
                layout=layout,
                precision=precision,
                attention=attention,
                attention_dropout=0.0 if attention == "varlen" else choices.attention_dropout,
                checkpointing=checkpointing,
                head=head,
            )
            # How rows are filled changes what they take only where documents are computed one by one.
            same = attention == "varlen" and layout == "packed"
            if same not in found:
                found[same] = _rows_or_why(asked, changed, model, target, machine)
            rows, note = found[same]
            hold = contents(asked, config_of(asked, changed, model))
            mean = None if hold.assumed else hold.mean_real_tokens
            yield WhatIf(
                model=model.name,
                precision=precision,
                attention=attention if known else "row",
                checkpointing=checkpointing,
                head=head,
                layout=layout,
                rows=rows,
                real_tokens=None if mean is None or rows is None else rows * mean,
                note=note,
            )


def _rows_or_why(
    asked: Asked, choices: Choices, model: ModelSettings, target: Target, machine: Machine
) -> tuple[int | None, str]:
    """What fits with these settings, and a word on it: where there is no answer, why."""
    config = config_of(asked, choices, model)
    try:
        estimate = estimate_model(_request(asked, config, contents(asked, config)), machine, _room(asked, target))
    except BadInput:
        return None, "not possible"
    except CannotTrace:
        return None, "not traced"
    rows = predicted_rows(estimate, target.budget_bytes, target.expected.usual, max_rows=asked.max_rows)
    return rows, "or more" if rows == asked.max_rows else ""


def _shards(asked: Asked, estimate: Estimate, found: Ledger) -> Iterator[tuple[str, ShardedBytes]]:
    if asked.ranks * asked.tensor_ranks * asked.pipeline_stages == 1:
        return
    state = state_of_terms(found.terms_bytes)
    largest = int(estimate.law.largest_parameter_bytes)
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP)")):
        layout = Layout(
            zero_stage=stage,
            data_ranks=asked.ranks,
            tensor_ranks=asked.tensor_ranks,
            pipeline_stages=asked.pipeline_stages,
        )
        yield name, shard(state, layout, largest_layer_bytes=largest)
