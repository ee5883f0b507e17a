"""A loop with ``Accelerator`` as a step to tune.

In the module that you name with ``--step``::

    def build_step(micro_batch_size, device):
        accelerator, model, optimizer, dataset, collate = make_parts()
        batch = longest_batch(dataset, collate, micro_batch_size)
        return accelerated_step(accelerator, model, optimizer, batch)

If your loop is a function of the batch size, you need no adapter: name it with
``--step``, or decorate it with ``autotune.find_batch_size``.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from autotune.subjects.jobs.longest_samples import Longest
from trainer.formats.errors import BadConfig

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


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
) -> Callable[[], None]:
    """Return an optimizer step as ``Accelerator`` takes it.

    Precision, accumulation and clipping are included.

    Args:
        accelerator: Yours, before ``prepare``.
        model: A model that takes ``**batch`` if the batch is a dictionary, and
            ``batch`` otherwise.
        optimizer: Its optimizer.
        batch: A micro-batch on the CPU, which every step copies to the device.
        loss_of: Function from the model's output and the batch to the loss; None takes
            ``output.loss``.
        max_grad_norm: Norm to which gradients are clipped; None does not clip.
    """
    from accelerate.utils import send_to_device

    module, stepper = accelerator.prepare(model, optimizer)
    module.train()

    def step() -> None:
        for _ in range(accelerator.gradient_accumulation_steps):
            inputs = send_to_device(batch, accelerator.device)
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
                accelerator.backward(loss)
                if max_grad_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), max_grad_norm)
                stepper.step()
                stepper.zero_grad()

    return step
