"""A loop with ``Accelerator`` as a step to tune.

In the module that you name with ``--step``::

    def build_step(micro_batch_size, device):
        accelerator, model, optimizer, dataset, collate = make_parts()
        batch = longest_batch(dataset, collate, micro_batch_size)
        return accelerated_step(accelerator, model, optimizer, batch, losses=losses)

If your loop is a function of the batch size, you need no adapter: name it with
``--step``, or decorate it with ``autotune.find_batch_size``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.subjects.jobs import load
from autotune.subjects.jobs.given_arguments import divide_arguments
from autotune.subjects.jobs.longest_samples import Longest
from autotune.subjects.jobs.overridden import overridden, require_made
from autotune.subjects.subject import FACTS, StepFacts
from trainer.formats.errors import BadConfig

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

_PARTS = 5
"""Accelerator, model, optimizer, dataset and collate function."""


def longest_batch(
    dataset: Any,
    collate: Callable[[Sequence[Any]], Any],
    micro_batch_size: int,
) -> Any:
    """Return a micro-batch of the dataset's longest sample: the most memory."""
    return collate(list(Longest(dataset, micro_batch_size)))


def accelerated_step(
    accelerator: "Accelerator",
    model: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer",
    batch: Any,
    *,
    loss_of: Callable[[Any, Any], Any] | None = None,
    max_grad_norm: float | None = 1.0,
    losses: bool = False,
) -> Callable[..., None]:
    """Return an optimizer step as ``Accelerator`` takes it.

    Precision, accumulation and clipping are included. In a window, the step takes the
    micro-batches of the loader instead of ``batch``.

    Args:
        accelerator: Yours, before ``prepare``.
        model: A model that takes ``**batch`` if the batch is a dictionary, and
            ``batch`` otherwise.
        optimizer: Its optimizer.
        batch: A micro-batch on the CPU, which every step copies to the device.
        loss_of: Function from the model's output and the batch to the loss; None takes
            ``output.loss``.
        max_grad_norm: Norm to which gradients are clipped; None does not clip.
        losses: True to keep the loss of each micro-batch.
    """
    from accelerate.utils import send_to_device

    module, stepper = accelerator.prepare(model, optimizer)
    module.train()

    kept: list[Any] = []

    def step(batches: Sequence[Any] | None = None) -> None:
        for number in range(accelerator.gradient_accumulation_steps):
            given = batch if batches is None else batches[number]
            inputs = send_to_device(given, accelerator.device)
            with accelerator.accumulate(module):
                output = module(**inputs) if hasattr(inputs, "keys") else module(inputs)
                if loss_of is None and not hasattr(output, "loss"):
                    what = (
                        f"the model returns {type(output).__name__}, which has no loss"
                    )
                    raise BadConfig(
                        what,
                        next_step=(
                            "Give accelerated_step a function loss_of(output, batch)."
                        ),
                    )
                loss = output.loss if loss_of is None else loss_of(output, inputs)
                if losses:
                    kept.append(loss.detach())
                accelerator.backward(loss)
                if max_grad_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), max_grad_norm)
                stepper.step()
                stepper.zero_grad()

    step.__dict__[FACTS] = StepFacts(
        micro_batches=accelerator.gradient_accumulation_steps,
        losses=(lambda: [float(loss) for loss in kept]) if losses else None,
        settings={"mixed_precision": str(accelerator.mixed_precision)},
    )
    return step


def build_step(
    *,
    build: str,
    arguments: Mapping[str, Any],
    directory: str,
    device: str,
    micro_batch_size: int,
    losses: bool = False,
    **settings: Any,
) -> Callable[..., None]:
    """Return the step of the loop whose parts a function returns.

    ``Adapter`` has the arguments; settings are arguments of ``Accelerator``.

    Raises:
        BadConfig: If the function does not return the parts, or its Accelerator is on
            another device.
    """
    parts = _parts(build, arguments, directory, settings)
    accelerator, model, optimizer, dataset, collate = parts
    if accelerator.device.type != device:
        raise BadConfig(
            f"the trial runs on {device!r}, but the Accelerator is on"
            f" {accelerator.device.type!r}",
            next_step=(
                "Set cpu=True in its Accelerator; or choose the device with --device."
            ),
        )
    batch = longest_batch(dataset, collate, micro_batch_size)
    return accelerated_step(accelerator, model, optimizer, batch, losses=losses)


def build_loader(
    *,
    build: str,
    arguments: Mapping[str, Any],
    directory: str,
    num_workers: int,
    micro_batch_size: int = 1,
    prefetch_factor: int | None = None,
    pin_memory: bool = False,
    **settings: Any,
) -> Any:
    """Return a DataLoader of the dataset whose parts a function returns.

    ``Adapter`` has the arguments and errors.
    """
    from torch.utils.data import DataLoader

    *_, dataset, collate = _parts(build, arguments, directory, settings)
    return DataLoader(
        dataset,
        batch_size=micro_batch_size,
        shuffle=True,
        collate_fn=collate,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
    )


def _parts(
    build: str, arguments: Mapping[str, Any], directory: str, settings: dict[str, Any]
) -> Any:
    """Return the parts of the loop that a function returns, with some settings."""
    from accelerate import Accelerator

    make = load.resolve(build, directory)
    known = load.named_parameters(Accelerator)
    given, fields = divide_arguments(make, build, arguments, known, "Accelerator")
    fields |= {name: value for name, value in settings.items() if name in known}
    others = {name: value for name, value in settings.items() if name not in known}
    with overridden(Accelerator, fields) as made:
        parts = make(**load.accepted(make, {**given, **others}))
    if fields:
        require_made(made, Accelerator, build)
    if not isinstance(parts, tuple) or len(parts) != _PARTS:
        raise BadConfig(
            f"{build} returned {type(parts).__name__}",
            next_step="Return (accelerator, model, optimizer, dataset, collate).",
        )
    return parts
