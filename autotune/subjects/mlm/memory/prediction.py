"""Memory predictions for all models of an ``autotune estimate``, as one answer."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from autotune.errors import AutotuneError, ExceedsMemory
from autotune.memory.estimate import CannotTrace
from autotune.profiles.decide.default_settings import default_layout, default_precision
from autotune.subjects.mlm.memory.alternatives import alternatives
from autotune.subjects.mlm.memory.predictor import Predictor
from autotune.subjects.mlm.memory.target import PredictionRequest, Target
from autotune.subjects.mlm.memory.values import Alternative, Answer, PredictedModel
from autotune.trials.fork_server import ForkServerMachine
from trainer.formats.progress import Update
from trainer.formats.train_config import ModelSettings, TrainConfig


def settings_of_step(
    model: ModelSettings,
    device: Literal["cuda", "cpu"],
    *,
    layout: str | None,
    precision: str | None,
    **others: object,
) -> TrainConfig:
    """Return the trainer's settings of a step.

    Args:
        model: The model.
        device: Device of the step.
        layout: Layout of sequences; None for the model's default.
        precision: Precision; None for the device's default.
        others: Further settings by name, as ``TrainConfig`` has them.
    """
    return TrainConfig.model_validate(
        {
            "model": model,
            "device": device,
            "layout": layout or default_layout(model),
            "precision": precision or default_precision(device),
            **others,
        }
    )


def predict(
    request: PredictionRequest, target: Target, *, what_if: bool, update: Update
) -> tuple[Answer, Mapping[str, AutotuneError]]:
    """Predict the largest micro-batch of every model.

    A model that does not fit, or can only be measured, does not affect the others.

    Args:
        request: The models and their settings.
        target: The device to predict for.
        what_if: True to predict alternative settings too.
        update: Reports progress.

    Returns:
        The answer, and the error of each model without a prediction, by name.
    """
    predicted: list[PredictedModel] = []
    rejected: dict[str, AutotuneError] = {}
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        predictor = Predictor(request=request, target=target, machine=machine)
        for number, config in enumerate(request.configs):
            update(number, len(request.configs), f"tracing {config.model.name}")
            try:
                predicted.append(predictor.predict(config))
            except (CannotTrace, ExceedsMemory) as error:
                rejected[config.model.name] = error
        alternative_settings: tuple[Alternative, ...] = ()
        if what_if:
            alternative_settings = tuple(alternatives(predictor, update))
    answer = Answer(
        target=target.name,
        reserve_bytes=target.reserve_bytes,
        models=tuple(predicted),
        what_if=alternative_settings,
        rejected={name: _error_json(error) for name, error in rejected.items()},
    )
    return answer, rejected


def _error_json(error: AutotuneError) -> dict[str, Any]:
    """Return the JSON of an error, as ``Answer.rejected`` has it."""
    return {
        "exit_code": error.exit_code,
        "message": error.message,
        "next_step": error.next_step,
    }


def joined_error(errors: Sequence[AutotuneError], probe_command: str) -> AutotuneError:
    """Return the first error, with the messages and next steps of all errors.

    So one error, with the exit code of the first, reports all of them.

    Args:
        errors: One or more errors; the first is changed.
        probe_command: Command that measures memory, the next step for models that
            cannot be traced.
    """
    next_steps = []
    for error in errors:
        next_step = error.next_step
        if isinstance(error, CannotTrace):
            next_step = f"Measure it on the target machine: {probe_command}"
        next_steps.append(next_step)
    first = errors[0]
    first.message = "\n".join(error.message for error in errors)
    # Several models may have the same next step.
    first.next_step = "\n  ".join(dict.fromkeys(next_steps))
    return first
