"""Predicted gains in throughput by changes of settings, from traces of the step."""

import contextlib
from collections.abc import Mapping

from autotune.errors import BadInput
from autotune.memory.estimate import CannotTrace, traced_work
from autotune.speed.decide import predict_speed
from autotune.speed.values import MachineRates
from autotune.subjects.mlm.memory.contents import sequence_contents
from autotune.subjects.mlm.memory.trace_request import trace_request
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.trial_machine import Machine
from trainer.formats.progress import Update
from trainer.formats.train_config import TrainConfig


def predicted_gains(
    train: TrainConfig,
    vocab_size: int,
    rates: MachineRates,
    changes: Mapping[str, Mapping[str, object]],
    update: Update,
) -> dict[str, float]:
    """Predict the gain in tokens/s by each of several changes of settings.

    Args:
        train: The present settings.
        vocab_size: Vocabulary size to assume.
        rates: Constants of the machine.
        changes: Changed settings, by name of the change.
        update: Reports progress.

    Returns:
        Tokens/s with a change over tokens/s with the present settings, by name of the
        change. Changes that cannot be traced are left out; it is empty if the present
        settings cannot be traced.
    """
    steps = 1 + len(changes)
    gains: dict[str, float] = {}
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        update(0, steps, "predicting the present step")
        try:
            present_tokens_per_s = _padded_tokens_per_s(
                train, vocab_size, rates, machine
            )
        except (CannotTrace, BadInput):
            return {}
        for number, (name, change) in enumerate(changes.items(), start=1):
            update(number, steps, f"predicting {name}")
            config = train.model_copy(update=dict(change))
            with contextlib.suppress(CannotTrace, BadInput):
                tokens_per_s = _padded_tokens_per_s(config, vocab_size, rates, machine)
                gains[name] = tokens_per_s / present_tokens_per_s
    return gains


def _padded_tokens_per_s(
    config: TrainConfig, vocab_size: int, rates: MachineRates, machine: Machine
) -> float:
    """Predict the throughput of a step of one micro-batch on one GPU.

    Raises:
        CannotTrace: If the step cannot be traced.
        BadInput: If the settings are invalid.
    """
    contents = sequence_contents(None, vocab_size, config)
    request = trace_request(config, contents, micro_batches=1, ranks=1)
    work = traced_work(request, machine, config.micro_batch_size)
    return predict_speed(work, rates, config).padded_tokens_per_s.value
