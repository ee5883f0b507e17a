"""transformers' own ``Trainer`` on the model and dataset of the bundled trainer.

Its arguments are transformers' defaults, apart from those that keep the model, the
learning rate and the samples of an optimizer step the same.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.subjects.mlm.jobs.samples import FullSamples, Samples, collator
from autotune.subjects.transformers.jobs import trainer_step
from trainer.data.dataset import TokenDataset
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import TrainConfig
from trainer.model.encoder import build_model
from trainer.model.encoder_config import build_config

if TYPE_CHECKING:
    from transformers import Trainer


def build_step(
    *,
    config: Mapping[str, Any],
    vocab_size: int,
    special_ids: Mapping[str, int],
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    device: str,
) -> Callable[[], None]:
    """Return the ``Trainer`` as a step on random samples that fill a sequence.

    Args:
        config: Settings of the bundled trainer, as JSON.
        vocab_size: Tokens of the vocabulary.
        special_ids: Ids of special tokens, by their roles.
        micro_batch_size: Samples of a micro-batch.
        gradient_accumulation_steps: Micro-batches of an optimizer step.
        device: Device of the trial.
    """
    settings = TrainConfig.model_validate(config)
    special = SpecialIds.model_validate(special_ids)
    samples = FullSamples(vocab_size, special, settings.seq_length_tokens)
    trainer = _trainer(
        settings, vocab_size, special, samples, gradient_accumulation_steps
    )
    return trainer_step(trainer, micro_batch_size, device, longest=False)


def build_training(
    *,
    config: Mapping[str, Any],
    vocab_size: int,
    special_ids: Mapping[str, int],
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    device: str,
    data_dir: str,
    num_workers: int,
    round_number: int = 0,
) -> Callable[[], None]:
    """Return the ``Trainer``'s own loop with its own loader of the dataset.

    Args:
        config: Settings of the bundled trainer, as JSON.
        vocab_size: Tokens of the vocabulary.
        special_ids: Ids of special tokens, by their roles.
        micro_batch_size: Samples of a micro-batch.
        gradient_accumulation_steps: Micro-batches of an optimizer step.
        device: Device of the trial.
        data_dir: Directory of the dataset.
        num_workers: DataLoader workers of the rank.
        round_number: Number of the window's round, from 0, by which samples differ.
    """
    settings = TrainConfig.model_validate(config)
    seed = settings.seed + round_number
    trainer = _trainer(
        settings.model_copy(update={"seed": seed}),
        vocab_size,
        SpecialIds.model_validate(special_ids),
        Samples(TokenDataset.open(Path(data_dir)), settings.seq_length_tokens),
        gradient_accumulation_steps,
    )
    return trainer_step(
        trainer, micro_batch_size, device, longest=False, num_workers=num_workers
    )


def _trainer(
    config: TrainConfig,
    vocab_size: int,
    special_ids: SpecialIds,
    samples: "torch.utils.data.Dataset[dict[str, Any]]",
    gradient_accumulation_steps: int,
) -> "Trainer":
    """Return the ``Trainer`` on samples."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(config.seed)
    model_config = build_config(
        config.model,
        vocab_size=vocab_size,
        special_ids=special_ids,
        seq_length_tokens=config.seq_length_tokens,
    )
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        gradient_accumulation_steps=gradient_accumulation_steps,
        learning_rate=config.learning_rate,
        seed=config.seed,
        use_cpu=config.device == "cpu",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_steps=1,
    )
    return Trainer(
        model=build_model(model_config, torch.device("cpu")),
        args=arguments,
        train_dataset=samples,
        data_collator=collator(
            vocab_size, special_ids, masking_probability=config.masking_probability
        ),
    )
