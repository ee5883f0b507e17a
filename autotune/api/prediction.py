"""``estimate``: the memory and speed of a model on a GPU, predicted without one."""

from autotune.api.amounts import bytes_of
from autotune.api.shown_progress import Progress, display_of
from autotune.base.defaults import (
    MAX_MICRO_BATCH_SIZE,
    SEQ_LENGTH_TOKENS,
    VOCAB_SIZE,
)
from autotune.subjects.mlm.memory.prediction import predict, settings_of_step
from autotune.subjects.mlm.memory.target import PredictionRequest, find_target
from autotune.subjects.mlm.memory.values import PredictedModel
from trainer.formats.presets import model_settings


def estimate(
    model: str,
    *,
    gpu: str | None = None,
    memory: str | int | None = None,
    seq_length: int = SEQ_LENGTH_TOKENS,
    precision: str | None = None,
    layout: str | None = None,
    activation_checkpointing: str = "none",
    compile: bool | None = None,
    ranks: int = 1,
    accumulate: bool = True,
    vocab_size: int = VOCAB_SIZE,
    max_micro_batch_size: int = MAX_MICRO_BATCH_SIZE,
    progress: Progress = True,
) -> PredictedModel:
    """Predict the largest micro-batch of a model on a GPU, without a GPU.

    Args:
        model: Name of a preset, or path of a config.json or profile.
        gpu: Key of the GPU, such as ``"h100-sxm-80gb"``; None to give ``memory``.
        memory: Memory budget, such as ``"24GiB"`` or a number of bytes; None for that
            of the GPU, less a reserve.
        seq_length: Tokens of a sequence.
        precision: ``"bf16"`` or ``"fp32"``; None for the default of a GPU.
        layout: Layout of sequences; None for the model's default.
        activation_checkpointing: ``"none"``, ``"selective"`` or ``"full"``.
        compile: True to compile layers; None for the default of a GPU.
        ranks: Data-parallel ranks on all nodes.
        accumulate: True if an optimizer step has several micro-batches on each rank.
        vocab_size: Tokens of the vocabulary.
        max_micro_batch_size: Largest size to predict.
        progress: As for ``find_batch_size``.

    Returns:
        The largest size, with its memory breakdown.

    Raises:
        ExceedsMemory: If not even one sequence fits.
        AutotuneError: If the GPU is not known, or the model cannot be traced.
        TrainerError: If there is no such model.
    """
    config = settings_of_step(
        model_settings(model),
        "cuda",
        layout=layout,
        precision=precision,
        seq_length_tokens=seq_length,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
    )
    request = PredictionRequest(
        configs=(config,),
        gpu=gpu,
        memory_bytes=None if memory is None else bytes_of(memory),
        data=None,
        vocab_size=vocab_size,
        ranks=ranks,
        accumulate=accumulate,
        tensor_ranks=1,
        pipeline_stages=1,
        max_micro_batch_size=max_micro_batch_size,
    )
    with display_of(progress).show(f"estimate {model}") as update:
        answer, rejected = predict(
            request, find_target(request), what_if=False, update=update
        )
    for error in rejected.values():
        raise error
    (predicted,) = answer.models
    return predicted
