"""Baselines of the bundled trainer: its own untuned settings, and other trainers.

All train the same model on the same dataset, with the same sequence length. The
recipes have the non-padding tokens of the tuned global batch; transformers' Trainer
reaches them by gradient accumulation, and the paper's trainer has its own batch.
"""

import contextlib
import math
from dataclasses import replace
from pathlib import Path

from autotune.evidence.baseline import TUNED, SettingDifference
from autotune.subjects.baseline import Baseline
from autotune.subjects.mlm.baselines.global_batch import (
    global_batch_tokens,
    non_padding_share,
)
from autotune.subjects.mlm.baselines.recipes import (
    Recipe,
    differences,
    padded,
    untuned,
)
from autotune.subjects.mlm.baselines.subject import OtherTrainerSubject
from autotune.subjects.mlm.subject import MlmSubject
from autotune.workers.decide.window_time import MOST_MICRO_BATCHES
from trainer.data.dataset import TokenDataset
from trainer.data.sequence_statistics import sequence_statistics

HF_MICRO_BATCH_SIZE = 8
"""Default of ``per_device_train_batch_size`` in transformers."""
PAPER_MICRO_BATCH_SIZE = 64
"""Samples of a batch of the paper's trainer."""
PAPER_WORKERS = 8
"""DataLoader workers of a rank of the paper's trainer."""
_IN_OTHER_TRAINERS = ("layout", "precision", "attention_dropout")
"""Settings of the recipes that other trainers have as well."""


def trainer_baselines(
    tuned: MlmSubject, data: Path, max_workers: int, limit: str, micro_batches: int
) -> list[Baseline]:
    """Return the tuned settings, and after them all baselines.

    Args:
        tuned: The bundled trainer with the tuned settings.
        data: Directory of the dataset.
        max_workers: Most DataLoader workers of a rank on this machine.
        limit: Reason for ``max_workers``.
        micro_batches: Gradient accumulation steps in the check that a micro-batch fits.
    """
    with contextlib.closing(TokenDataset.open(data)) as dataset:
        tokens = global_batch_tokens(tuned.config, dataset)
        untuned_recipe = untuned(tuned.config, tokens)
        padded_recipe = padded(tuned.config, tokens, max_workers, limit)
        # Samples are trimmed, so that a sequence is a sample.
        samples = sequence_statistics(untuned_recipe.config, dataset)
        steps = tokens / (
            samples.mean_non_padding_tokens * HF_MICRO_BATCH_SIZE * tuned.local_ranks
        )
        accumulation = min(MOST_MICRO_BATCHES, max(1, math.ceil(steps)))
        return [
            _of_trainer(TUNED, tuned, dataset),
            *(
                _of_recipe(recipe, tuned, dataset, micro_batches)
                for recipe in (untuned_recipe, padded_recipe)
            ),
            _hf_trainer(
                tuned, untuned_recipe, samples.mean_non_padding_tokens, accumulation
            ),
            _paper(
                tuned,
                padded_recipe,
                samples.mean_non_padding_tokens,
                max_workers,
                limit,
            ),
        ]


def tuned_trainer(name: str, tuned: MlmSubject, data: Path) -> Baseline:
    """Return the tuned settings alone, under a name.

    Args:
        name: Name of its row.
        tuned: The bundled trainer with the tuned settings.
        data: Directory of the dataset.
    """
    with contextlib.closing(TokenDataset.open(data)) as dataset:
        return _of_trainer(name, tuned, dataset)


def _of_trainer(name: str, subject: MlmSubject, dataset: TokenDataset) -> Baseline:
    """Return the bundled trainer with its settings as they are."""
    return Baseline(
        name=name,
        subject=subject,
        choice={"micro_batch_size": subject.config.micro_batch_size},
        non_padding_share=non_padding_share(subject.config, dataset),
    )


def _of_recipe(
    recipe: Recipe, tuned: MlmSubject, dataset: TokenDataset, micro_batches: int
) -> Baseline:
    """Return a recipe as settings of the bundled trainer."""
    config = recipe.config
    return Baseline(
        name=recipe.name,
        subject=tuned.model_copy(update={"config": config}),
        choice={"micro_batch_size": config.micro_batch_size},
        differences=differences(recipe, tuned.config, tuned.local_ranks),
        non_padding_share=non_padding_share(config, dataset),
        fit_choice={
            "global_batch_tokens": None,
            "global_batch_samples": None,
            "micro_batches": micro_batches,
        },
    )


def _hf_trainer(
    tuned: MlmSubject, recipe: Recipe, tokens_per_sample: float, accumulation: int
) -> Baseline:
    """Return transformers' Trainer, whose defaults the recipe imitates."""
    subject = OtherTrainerSubject(
        trainer="hf-trainer",
        config=tuned.config,
        vocab_size=tuned.vocab_size,
        special_ids=tuned.special_ids,
        tokens_per_sample=tokens_per_sample,
        gradient_accumulation_steps=accumulation,
    )
    baseline = _of_other_trainer(subject, recipe, HF_MICRO_BATCH_SIZE, 0, {})
    return replace(baseline, fed_by="training")


def _paper(
    tuned: MlmSubject,
    recipe: Recipe,
    tokens_per_sample: float,
    max_workers: int,
    limit: str,
) -> Baseline:
    """Return the paper's trainer, with as many workers as the machine allows."""
    subject = OtherTrainerSubject(
        trainer="paper",
        config=tuned.config,
        vocab_size=tuned.vocab_size,
        special_ids=tuned.special_ids,
        tokens_per_sample=tokens_per_sample,
    )
    workers = min(PAPER_WORKERS, max_workers)
    reasons = {}
    if workers < PAPER_WORKERS:
        reasons["data.num_workers"] = (
            f"the paper's {PAPER_WORKERS} exceed the limit of this machine: {limit}"
        )
    return _of_other_trainer(subject, recipe, PAPER_MICRO_BATCH_SIZE, workers, reasons)


def _of_other_trainer(
    subject: OtherTrainerSubject,
    recipe: Recipe,
    micro_batch_size: int,
    num_workers: int,
    reasons: dict[str, str],
) -> Baseline:
    """Return another trainer with its size and its workers.

    Args:
        subject: The trainer, with the tuned settings.
        recipe: Settings of the bundled trainer that imitate it.
        micro_batch_size: Samples of a micro-batch.
        num_workers: DataLoader workers of a rank.
        reasons: Reasons for values that are not the trainer's own choice.
    """
    tuned = subject.config
    of_recipe = differences(recipe, tuned, local_ranks=1)
    of_trainer = [
        difference for difference in of_recipe if difference.key in _IN_OTHER_TRAINERS
    ]
    values = {
        "micro_batch_size": (micro_batch_size, tuned.micro_batch_size),
        "data.num_workers": (num_workers, tuned.data.num_workers),
    }
    for key, (theirs, of_tuned) in values.items():
        if theirs != of_tuned or key in reasons:
            of_trainer.append(
                SettingDifference(
                    key=key, theirs=theirs, tuned=of_tuned, reason=reasons.get(key)
                )
            )
    return Baseline(
        name=subject.trainer,
        subject=subject,
        choice={"micro_batch_size": micro_batch_size},
        loader_settings={"num_workers": num_workers},
        differences=of_trainer,
        fit_choice={},
    )
