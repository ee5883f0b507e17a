"""Text of the answer of ``autotune estimate``."""

from collections.abc import Iterator, Sequence

from autotune.base import document as doc
from autotune.base.document import paragraph, table_of
from autotune.base.render_console import console_text
from autotune.base.units import format_bytes, format_count, format_share
from autotune.memory.decide.overheads import MEASURED_TORCH, unconfirmed_share
from autotune.memory.sections.shares import shares_table
from autotune.memory.sections.terms import TermLine, term_lines
from autotune.memory.values import MemoryBreakdown, Term
from autotune.speed.sections import speed_table
from autotune.subjects.mlm.memory.values import Alternative, Answer, PredictedModel

_SMALL_SHARE = 0.001
"""Share of the peak below which terms are summed up."""
_FRAGMENTED_SHARE = 0.05
"""Share of the peak lost to fragmentation above which it is reported."""


def estimate_text(answer: Answer, next_command: str) -> str:
    """Return the text of an answer, with the command to run next at its end.

    Returns:
        Empty text if no model and no alternative is predicted.
    """
    if not (answer.models or answer.what_if):
        return ""
    reserve = ""
    if answer.reserve_bytes:
        reserve = f" ({format_bytes(answer.reserve_bytes)} of its memory stay free)"
    blocks: list[doc.Block] = [
        paragraph(f"Predicted for {answer.target}{reserve}; nothing was measured.")
    ]
    if answer.models:
        blocks.append(paragraph(_traced_words(answer.models)))
        blocks.append(_summary(answer.models))
        for model in answer.models:
            blocks += _model_blocks(model)
    if answer.what_if:
        blocks.append(_alternatives_table(answer.what_if))
        if any(choice.attention == "varlen" for choice in answer.what_if):
            blocks.append(
                paragraph(
                    "varlen requires attention dropout 0, which changes the recipe of"
                    " models that use it."
                )
            )
    if answer.models:
        blocks.append(paragraph(f"next: measure it on that machine: {next_command}"))
    return console_text(blocks)


def _traced_words(models: Sequence[PredictedModel]) -> str:
    """Return a sentence about the version of torch that made the traces."""
    words = f"Traced with torch {models[0].torch}; other versions may keep more or less"
    if any(_is_unconfirmed(model) for model in models):
        words += (
            f". Measured on a GPU was torch {MEASURED_TORCH}, which needs more: the"
            " lower end of the range is for it"
        )
    return f"{words}."


def _is_unconfirmed(model: PredictedModel) -> bool:
    """Return whether torch is so new that the traced memory may be too low."""
    is_compiled = model.config.compile is not False
    share = unconfirmed_share(model.config.device, model.torch, is_compiled=is_compiled)
    return share > 0


def _alternatives_table(alternatives: Sequence[Alternative]) -> doc.Table:
    """Return the table of alternative settings, with a line for each."""
    return table_of(
        "Alternatives (predicted largest micro-batch)",
        alternatives,
        ("model", "l", lambda choice: choice.model),
        ("precision", "l", lambda choice: choice.precision),
        ("attention", "l", lambda choice: choice.attention),
        (
            "activation_checkpointing",
            "l",
            lambda choice: choice.activation_checkpointing,
        ),
        ("mlm_head", "l", lambda choice: choice.mlm_head),
        ("layout", "l", lambda choice: choice.layout),
        ("max micro-batch", "r", _size_with_note),
        (
            "non-padding tokens",
            "r",
            lambda choice: format_count(choice.non_padding_tokens),
        ),
    )


def _size_with_note(alternative: Alternative) -> str:
    """Return the largest micro-batch of an alternative, with its note.

    It is empty if no sequence fits and there is no note.
    """
    if not alternative.micro_batch_size:
        return alternative.note
    return f"{alternative.micro_batch_size} {alternative.note}".rstrip()


def _summary(predicted: Sequence[PredictedModel]) -> doc.Table:
    """Return the table of predictions, with a line for each model."""
    return table_of(
        "",
        predicted,
        ("model", "l", lambda model: model.model),
        ("parameters", "r", lambda model: f"{model.parameters / 1e6:.1f} M"),
        ("max micro-batch", "r", _max_size),
        ("range", "r", _size_range),
        (
            "tokens incl. padding",
            "r",
            lambda model: format_count(
                model.micro_batch_size * model.config.seq_length_tokens
            ),
        ),
        (
            "non-padding tokens",
            "r",
            lambda model: format_count(model.non_padding_tokens),
        ),
        ("samples", "r", lambda model: format_count(model.samples)),
        ("peak memory", "r", lambda model: format_bytes(model.breakdown.peak_bytes)),
        ("per sequence", "r", lambda model: format_bytes(model.bytes_per_sequence)),
        ("tokens/s", "r", _predicted_rate),
        ("MFU", "r", _predicted_mfu),
    )


def _max_size(model: PredictedModel) -> str:
    """Return the largest micro-batch, marked if larger sizes were not tried."""
    sign = "at least " if model.limited else ""
    return f"{sign}{model.micro_batch_size}"


def _size_range(model: PredictedModel) -> str | None:
    """Return the range of the largest micro-batch; None if it was not searched."""
    if model.limited:
        return None
    return f"{model.micro_batch_size_low} to {model.micro_batch_size_high}"


def _predicted_rate(model: PredictedModel) -> str | None:
    """Return the predicted throughput in tokens/s, padding included."""
    if model.speed is None:
        return None
    return format_count(model.speed.padded_tokens_per_s.value)


def _predicted_mfu(model: PredictedModel) -> str | None:
    if model.speed is None or model.speed.mfu is None:
        return None
    return format_share(model.speed.mfu.value)


def _model_blocks(model: PredictedModel) -> Iterator[doc.Block]:
    """Yield the settings of one model, its memory by term, and its predicted speed.

    If several GPUs share the model, the memory of one of them follows.
    """
    config = model.config
    yield paragraph(
        f"{config.model.name}: {config.layout} sequences of {config.seq_length_tokens}"
        f" tokens, {config.precision}, {model.attention} attention"
        f" ({model.attention_reason}), activation checkpointing"
        f" {config.activation_checkpointing}, {config.mlm_head} MLM head, budget"
        f" {format_bytes(model.budget_bytes)}"
    )
    yield _breakdown_table(model.breakdown)
    lost_bytes = model.breakdown.terms_bytes.get(Term.ROUNDING, 0)
    if lost_bytes > _FRAGMENTED_SHARE * model.breakdown.peak_bytes:
        lost = format_bytes(lost_bytes)
        yield paragraph(f"{lost} are lost to fragmentation and rounding")
    if model.speed is None:
        yield paragraph(
            "tokens/s not predicted: measure the constants of that machine with"
            " autotune doctor --measure"
        )
    else:
        yield speed_table(model.speed, model.micro_batch_size)
    if model.shares:
        yield shares_table(
            model.shares,
            "Memory when GPUs share the model, at the same micro-batch size",
        )


def _breakdown_table(breakdown: MemoryBreakdown) -> doc.Table:
    """Return the table of memory by term, the largest first, small terms added up."""
    peak_bytes = breakdown.peak_bytes
    large = {
        term: size
        for term, size in breakdown.terms_bytes.items()
        if size >= _SMALL_SHARE * peak_bytes
    }
    lines = term_lines(large)
    other_bytes = peak_bytes - sum(large.values())
    if other_bytes:
        lines.append(TermLine(name="other", size_bytes=other_bytes))
    lines.append(TermLine(name="peak", size_bytes=peak_bytes))
    return table_of(
        "",
        lines,
        (
            f"memory at micro-batch size {breakdown.micro_batch_size}",
            "l",
            lambda line: line.name,
        ),
        ("bytes", "r", lambda line: line.size),
        ("share", "r", lambda line: f"{line.size_bytes / peak_bytes:.1%}"),
    )
