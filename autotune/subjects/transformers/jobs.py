"""Hugging Face ``Trainer`` as a step and a loader to tune.

In the module that you name with ``--step`` and ``--loader``::

    def build_step(micro_batch_size, device):
        return trainer_step(make_trainer(), micro_batch_size, device)

    def build_loader(num_workers):
        return trainer_loader(make_trainer(), num_workers)

``make_trainer()`` is yours: it returns a configured ``Trainer``, as before ``train()``.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.subjects.jobs import load
from autotune.subjects.jobs.given_arguments import divide_arguments
from autotune.subjects.jobs.longest_samples import Longest
from autotune.subjects.jobs.overridden import overridden, require_made
from autotune.subjects.own.subject import LOOP
from autotune.subjects.subject import FACTS, StepFacts
from trainer.formats.errors import BadConfig

if TYPE_CHECKING:
    from transformers import Trainer

_ENDLESS_STEPS = 10**9
VARIED = ("bf16", "torch_compile", "gradient_checkpointing")
"""Fields of ``TrainingArguments`` that may be varied."""
_STEPS = 4
"""Optimizer steps of an epoch."""


def trainer_step(
    trainer: "Trainer",
    micro_batch_size: int,
    device: str | None = None,
    *,
    gradient_accumulation_steps: int | None = None,
    longest: bool = True,
    num_workers: int = 0,
    losses: bool = False,
) -> Callable[[], None]:
    """Return the training loop of a ``Trainer`` as a step to probe.

    Its optimizer, precision and accumulation are included. Nothing is saved, evaluated
    or logged, and no callback stops it early.

    Args:
        trainer: A trainer that has not trained yet.
        micro_batch_size: Its ``per_device_train_batch_size``.
        device: Device of the trial, which must be the trainer's.
        gradient_accumulation_steps: Micro-batches of an optimizer step; None keeps the
            trainer's.
        longest: True to train on the longest sample of the dataset alone, the worst
            case for memory: the longest of 20,000, spread over the dataset. False, or a
            dataset without length, trains on samples as they come.
        num_workers: Its ``dataloader_num_workers``; 0 collates samples in this process.
        losses: True to keep the loss of each micro-batch.

    Raises:
        BadConfig: If the trainer is on another device.
    """
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_callback import (
        EarlyStoppingCallback,
        PrinterCallback,
        ProgressCallback,
        TrainerCallback,
    )

    class OnlyTrain(TrainerCallback):  # the last callback
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = control.should_evaluate = control.should_log = (
                control.should_training_stop
            ) = False

        on_epoch_end = on_step_end

    args: Any = trainer.args
    if device is not None and args.device.type != device:
        what = (
            f"the trial runs on {device!r}, but the Trainer is on {args.device.type!r}"
        )
        raise BadConfig(
            what,
            next_step=(
                "Set use_cpu in its TrainingArguments; or choose the device with"
                " --device."
            ),
        )
    changes: dict[str, Any] = {
        "per_device_train_batch_size": micro_batch_size,
        "auto_find_batch_size": False,
        "max_steps": _ENDLESS_STEPS,
        "eval_strategy": "no",
        "save_strategy": "no",
        "dataloader_num_workers": num_workers,
        "load_best_model_at_end": False,
    }
    if gradient_accumulation_steps is not None:
        changes["gradient_accumulation_steps"] = gradient_accumulation_steps
        trainer.accelerator.gradient_state.plugin_kwargs["num_steps"] = (
            gradient_accumulation_steps
        )
    for name, value in changes.items():
        setattr(args, name, value)
    trainer._train_batch_size = args.train_batch_size
    for callback in (
        *INTEGRATION_TO_CALLBACK.values(),
        EarlyStoppingCallback,
        PrinterCallback,
        ProgressCallback,
    ):
        trainer.remove_callback(callback)
    trainer.add_callback(OnlyTrain())
    if (
        longest
        and hasattr(trainer.train_dataset, "__getitem__")
        and hasattr(trainer.train_dataset, "__len__")
    ):
        count = _STEPS * micro_batch_size * args.gradient_accumulation_steps
        trainer.train_dataset = Longest(trainer.train_dataset, count)

    kept = _kept_losses(trainer) if losses else None

    def train() -> None:
        trainer.train()

    train.__dict__[LOOP] = True
    train.__dict__[FACTS] = StepFacts(
        micro_batches=args.gradient_accumulation_steps,
        losses=None if kept is None else lambda: [float(loss) for loss in kept],
        settings={name: bool(getattr(args, name)) for name in VARIED},
    )
    return train


def _kept_losses(trainer: "Trainer") -> list[Any]:
    """Return a list that gets the loss of each micro-batch of a ``Trainer``."""
    kept: list[Any] = []
    training_step = trainer.training_step

    def keep(*arguments: Any, **options: Any) -> Any:
        loss = training_step(*arguments, **options)
        kept.append(loss.detach())
        return loss

    trainer.__dict__["training_step"] = keep
    return kept


def trainer_loader(
    trainer: "Trainer", num_workers: int, micro_batch_size: int | None = None
) -> Any:
    """Return the training DataLoader of a ``Trainer`` with these workers."""
    trainer.args.dataloader_num_workers = num_workers
    if micro_batch_size is not None:
        trainer.args.per_device_train_batch_size = micro_batch_size
        trainer._train_batch_size = trainer.args.train_batch_size
    return trainer.get_train_dataloader()


def build_step(
    *,
    build: str,
    arguments: Mapping[str, Any],
    directory: str,
    device: str,
    micro_batch_size: int | None = None,
    losses: bool = False,
    **settings: Any,
) -> Callable[[], None]:
    """Return the training loop of the ``Trainer`` that a function makes.

    ``Adapter`` has the arguments and errors; settings are fields of
    ``TrainingArguments``.
    """
    trainer = _make_trainer(build, arguments, directory, settings)
    size = micro_batch_size or trainer.args.per_device_train_batch_size
    return trainer_step(trainer, size, device, losses=losses)


def build_training(
    *,
    build: str,
    arguments: Mapping[str, Any],
    directory: str,
    device: str,
    micro_batch_size: int | None = None,
    num_workers: int | None = None,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
    **settings: Any,
) -> Callable[[], None]:
    """Return the training loop of a ``Trainer`` with its dataset and its loader.

    Args:
        build: Name of the function that makes the trainer.
        arguments: Its fixed arguments.
        directory: Directory from which it is imported.
        device: Device of the trial.
        micro_batch_size: Samples of a batch; None keeps the trainer's.
        num_workers: DataLoader workers; None keeps the trainer's.
        prefetch_factor: As for ``build_loader``.
        pin_memory: As for ``build_loader``.
        settings: Fields of ``TrainingArguments``, and other arguments of the function.

    Raises:
        BadConfig: If it makes no ``Trainer``.
    """
    trainer = _make_trainer(build, arguments, directory, settings)
    args = trainer.args
    workers = args.dataloader_num_workers if num_workers is None else num_workers
    _set_loader(args, workers, prefetch_factor, pin_memory)
    size = micro_batch_size or args.per_device_train_batch_size
    return trainer_step(trainer, size, device, longest=False, num_workers=workers)


def build_loader(
    *,
    build: str,
    arguments: Mapping[str, Any],
    directory: str,
    num_workers: int,
    micro_batch_size: int | None = None,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
    **settings: Any,
) -> Any:
    """Return the training loader of the ``Trainer`` that a function makes.

    ``Adapter`` has the arguments and errors.
    """
    trainer = _make_trainer(build, arguments, directory, settings)
    _set_loader(trainer.args, num_workers, prefetch_factor, pin_memory)
    return trainer_loader(trainer, num_workers, micro_batch_size)


def _set_loader(
    args: Any, num_workers: int, prefetch_factor: int | None, pin_memory: bool | None
) -> None:
    """Set what ``TrainingArguments`` have of a loader; None keeps a setting."""
    if prefetch_factor is not None and num_workers:
        args.dataloader_prefetch_factor = prefetch_factor
    if pin_memory is not None:
        args.dataloader_pin_memory = pin_memory


def untuned_settings(
    *, build: str, arguments: Mapping[str, Any], directory: str
) -> dict[str, Any]:
    """Return the size and the loader settings of the ``Trainer`` as it is made.

    Raises:
        BadConfig: If the function makes no ``Trainer``.
    """
    args = _make_trainer(build, arguments, directory, {}).args
    return {
        "micro_batch_size": args.per_device_train_batch_size,
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "pin_memory": args.dataloader_pin_memory,
    }


def _make_trainer(
    build: str, arguments: Mapping[str, Any], directory: str, settings: dict[str, Any]
) -> Any:
    """Return the ``Trainer`` that a function makes with some settings."""
    from transformers import Trainer, TrainingArguments

    make = load.resolve(build, directory)
    known = TrainingArguments.__dataclass_fields__
    given, fields = divide_arguments(make, build, arguments, known, "TrainingArguments")
    fields |= {name: value for name, value in settings.items() if name in known}
    others = {name: value for name, value in settings.items() if name not in known}
    with overridden(TrainingArguments, fields) as made:
        trainer = make(**load.accepted(make, {**given, **others}))
    if fields:
        require_made(made, TrainingArguments, build)
    if not isinstance(trainer, Trainer):
        raise BadConfig(
            f"{build} returned {type(trainer).__name__}, which is no Trainer",
            next_step="Return a transformers.Trainer, as before train().",
        )
    return trainer
