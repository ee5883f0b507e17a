"""A ``LightningModule`` and its data as a step and a loader to tune.

In the module that you name with ``--step`` and ``--loader``::

    def build_step(micro_batch_size, device):
        return module_step(
            Module(), Data(), micro_batch_size, device, precision="bf16-mixed"
        )

    def build_loader(num_workers):
        return module_loader(Data(), num_workers)
"""

import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from autotune.subjects.jobs import load
from autotune.subjects.jobs.given_arguments import divide_arguments
from autotune.subjects.jobs.overridden import override
from autotune.subjects.own.subject import LOOP
from autotune.subjects.subject import FACTS, StepFacts
from trainer.formats.errors import BadConfig

_EPOCHS = 1000
"""Epochs, from which schedules may compute their length."""


def module_step(
    module: Any,
    datamodule: Any = None,
    micro_batch_size: int | None = None,
    device: str = "cpu",
    *,
    batch_arg_name: str = "batch_size",
    losses: bool = False,
    **trainer_options: Any,
) -> Callable[[], None]:
    """Return a loop of Lightning's ``Trainer.fit`` on one device as a step to probe.

    Nothing is validated, logged or saved.

    Args:
        module: A ``LightningModule``; without ``datamodule``, with its own
            ``train_dataloader``.
        datamodule: A ``LightningDataModule``, or None.
        micro_batch_size: Value of the attribute, or hyperparameter, from which the data
            loader takes its batch size.
        device: Device of the trial.
        batch_arg_name: Name of that attribute, as for ``BatchSizeFinder``.
        losses: True to keep the loss of each micro-batch.
        trainer_options: Options of ``Trainer`` that a step depends on, such as
            ``precision``, ``accumulate_grad_batches`` and ``gradient_clip_val``.

    Raises:
        BadConfig: If neither module has the attribute.
    """
    set_attribute((datamodule, module), batch_arg_name, micro_batch_size)
    package = _package(module)

    kept: list[Any] = []

    class KeptLosses(package.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, *_: Any
        ) -> None:
            kept.append(outputs["loss"].detach())

    class NothingMonitored(package.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for one in trainer.lr_scheduler_configs:
                one.strict = False  # it may wait for a metric of a validation

    callbacks = trainer_options.pop("callbacks", None) or []
    quiet: dict[str, Any] = {
        "accelerator": "gpu" if device == "cuda" else "cpu",
        "devices": 1,
        "max_epochs": _EPOCHS,
        "logger": (
            importlib.import_module(f"{package.__name__}.loggers.logger").DummyLogger()
        ),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "default_root_dir": tempfile.gettempdir(),
    }
    several = callbacks if isinstance(callbacks, list) else [callbacks]
    if losses:
        several = [*several, KeptLosses()]
    trainer = package.Trainer(
        **quiet | trainer_options, callbacks=[*several, NothingMonitored()]
    )

    def train() -> None:
        trainer.fit(module, datamodule=datamodule)
        if not trainer.global_step:
            next_step = "Does it drop the last batch of a dataset smaller than that?"
            raise BadConfig(
                f"the loader has no batch at {batch_arg_name}={micro_batch_size}",
                next_step=next_step,
            )

    train.__dict__[LOOP] = True
    train.__dict__[FACTS] = StepFacts(
        micro_batches=trainer.accumulate_grad_batches,
        losses=(lambda: [float(loss) for loss in kept]) if losses else None,
        settings={"precision": str(trainer.precision)},
    )
    return train


def module_loader(
    data: Any,
    num_workers: int,
    micro_batch_size: int | None = None,
    *,
    batch_arg_name: str = "batch_size",
    workers_arg_name: str = "num_workers",
) -> Any:
    """Return the training loader of a module or datamodule, with these workers."""
    set_attribute((data,), workers_arg_name, num_workers)
    set_attribute((data,), batch_arg_name, micro_batch_size)
    if hasattr(data, "prepare_data"):
        data.prepare_data()
    if hasattr(data, "setup"):
        data.setup("fit")
    return data.train_dataloader()


def set_attribute(owners: tuple[Any, ...], name: str, value: int | None) -> None:
    """Set an attribute, or a hyperparameter, wherever one of the modules has it.

    Nothing is set if ``value`` is None.
    """
    places = [
        place
        for owner in owners
        for place in (owner, getattr(owner, "hparams", None))
        if hasattr(place, name)
    ]
    if value is not None and not places:
        names = " or ".join(
            type(owner).__name__ for owner in owners if owner is not None
        )
        what = f"there is no attribute or hyperparameter {name!r} in {names}"
        raise BadConfig(
            what,
            next_step=(
                f"Let the loader use self.{name}; or name another with batch_arg_name."
            ),
        )
    for place in places if value is not None else ():
        setattr(place, name, value)


def _package(module: Any) -> Any:
    """Return a module's package: ``lightning.pytorch`` or ``pytorch_lightning``."""
    names = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    return importlib.import_module(
        "pytorch_lightning" if "pytorch_lightning" in names else "lightning.pytorch"
    )


def build_step(
    *,
    build: str,
    arguments: Mapping[str, Any],
    directory: str,
    device: str,
    micro_batch_size: int | None = None,
    precision: str | None = None,
    losses: bool = False,
    prepared: Callable[[tuple[Any, ...]], object] = lambda owners: None,
    **others: Any,
) -> Callable[[], None]:
    """Return the loop of the module that a function returns.

    ``Adapter`` has the arguments and errors; ``precision`` is that of Lightning's
    ``Trainer``. ``prepared`` is called with the data and the module before the loop is
    made.
    """
    module, data, options = _parts(build, arguments, directory, others)
    if precision is not None:
        options = options | {"precision": precision}
    prepared((data, module))
    return module_step(module, data, micro_batch_size, device, losses=losses, **options)


def build_training(
    *,
    build: str,
    arguments: Mapping[str, Any],
    directory: str,
    device: str,
    num_workers: int | None = None,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
    **others: Any,
) -> Callable[[], None]:
    """Return the loop of the module that a function returns, with its loader.

    Args:
        build: Name of the function.
        arguments: Its fixed arguments.
        directory: Directory from which it is imported.
        device: Device of the trial.
        num_workers: DataLoader workers; None keeps the data's.
        prefetch_factor: Batches that each worker prefetches; None keeps the data's.
        pin_memory: True to pin batches; None keeps the data's.
        others: Further arguments of ``build_step``.

    Raises:
        BadConfig: If it returns no module, or one without an attribute for the workers.
    """

    def set_loader(owners: tuple[Any, ...]) -> None:
        set_attribute(owners, "num_workers", num_workers)
        # ``Trainer.fit`` makes loaders late: until the process ends.
        _override_loaders(num_workers, prefetch_factor, pin_memory)

    return build_step(
        build=build,
        arguments=arguments,
        directory=directory,
        device=device,
        prepared=set_loader,
        **others,
    )


def build_loader(
    *,
    build: str,
    arguments: Mapping[str, Any],
    directory: str,
    num_workers: int,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
    micro_batch_size: int | None = None,
    **others: Any,
) -> Any:
    """Return the training loader of the module that a function returns.

    ``Adapter`` has the arguments and errors.
    """
    module, data, _ = _parts(build, arguments, directory, others)
    owner = module if data is None else data
    restore = _override_loaders(num_workers, prefetch_factor, pin_memory)
    try:
        return module_loader(owner, num_workers, micro_batch_size)
    finally:
        restore()


def _override_loaders(
    num_workers: int | None, prefetch_factor: int | None, pin_memory: bool | None
) -> Callable[[], None]:
    """Replace arguments with which the module makes its DataLoaders, from now on.

    A module has no common attribute for them, as it has for the number of workers.

    Returns:
        The function that ends it.
    """
    if prefetch_factor is None and pin_memory is None:
        return lambda: None

    def settings_for(given: Mapping[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        # torch rejects it for a loader without workers, as another one may be.
        if prefetch_factor is not None and num_workers and given.get("num_workers"):
            settings["prefetch_factor"] = prefetch_factor
        if pin_memory is not None:
            settings["pin_memory"] = pin_memory
        return settings

    return override(DataLoader, settings_for)


def untuned_settings(
    *, build: str, arguments: Mapping[str, Any], directory: str
) -> dict[str, Any]:
    """Return the size and the workers of the module or its data as they are made.

    Raises:
        BadConfig: If the function returns no module.
    """
    module, data, _ = _parts(build, arguments, directory, {})
    settings = {"micro_batch_size": "batch_size", "num_workers": "num_workers"}
    return {
        name: _attribute((data, module), attribute)
        for name, attribute in settings.items()
    }


def _attribute(owners: tuple[Any, ...], name: str) -> Any:
    """Return an attribute, or a hyperparameter, of the first module that has it."""
    for owner in owners:
        for place in (owner, getattr(owner, "hparams", None)):
            if hasattr(place, name):
                return getattr(place, name)
    return None


def _parts(
    build: str,
    arguments: Mapping[str, Any],
    directory: str,
    others: Mapping[str, Any],
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the module, its data or None, and options of the ``Trainer``."""
    make = load.resolve(build, directory)
    # Both packages have the same Trainer; yours has imported one of them by now.
    is_older = "lightning.pytorch" not in sys.modules
    package = "pytorch_lightning" if is_older else "lightning.pytorch"
    known = load.named_parameters(importlib.import_module(package).Trainer)
    given, fields = divide_arguments(make, build, arguments, known, "Trainer")
    made = make(**load.accepted(make, {**given, **others}))
    module, data, options = made, None, None
    if isinstance(made, tuple):
        module, data, options = (*made, None, None)[:3]
    if not hasattr(module, "configure_optimizers"):
        raise BadConfig(
            f"{build} returned {type(module).__name__}, which is no LightningModule",
            next_step="Return a module, or (module, datamodule).",
        )
    return module, data, {**(options or {}), **fields}
