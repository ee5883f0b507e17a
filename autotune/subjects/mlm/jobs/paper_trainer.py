"""The paper's trainer on the model's sizes and the dataset of the bundled trainer."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from autotune.subjects.mlm.jobs.paper_model import RecipeModel, RecipeStep
from autotune.subjects.mlm.jobs.samples import FullSamples, Samples, collator
from trainer.data.dataset import TokenDataset
from trainer.formats.errors import BadConfig
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import TrainConfig

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)


def build_step(
    *,
    config: Mapping[str, Any],
    vocab_size: int,
    special_ids: Mapping[str, int],
    micro_batch_size: int,
    device: str,
    rendezvous: str | None = None,
) -> Callable[[], None]:
    """Return the trainer's step on random samples that fill a sequence.

    Args:
        config: Settings of the bundled trainer, as JSON.
        vocab_size: Tokens of the vocabulary.
        special_ids: Ids of special tokens, by their roles.
        micro_batch_size: Samples of a batch, which is that of a step.
        device: Device of the trial.
        rendezvous: File through which several ranks connect.

    Raises:
        BadConfig: If the model's config lacks a size.
    """
    settings = TrainConfig.model_validate(config)
    special = SpecialIds.model_validate(special_ids)
    samples = FullSamples(vocab_size, special, settings.seq_length_tokens)
    collate = collator(vocab_size, special, settings.seq_length_tokens)
    batch = collate([samples[number] for number in range(micro_batch_size)])
    step = _step(settings, vocab_size, special, device, rendezvous)
    return lambda: step.run(batch)


def build_window_step(
    *,
    config: Mapping[str, Any],
    vocab_size: int,
    special_ids: Mapping[str, int],
    device: str,
    rendezvous: str | None = None,
) -> Callable[[Any], None]:
    """Return the trainer's step for batches of its loader.

    Arguments and errors are those of ``build_step``.
    """
    settings = TrainConfig.model_validate(config)
    special = SpecialIds.model_validate(special_ids)
    return _step(settings, vocab_size, special, device, rendezvous).run


def build_loader(
    *,
    config: Mapping[str, Any],
    vocab_size: int,
    special_ids: Mapping[str, int],
    micro_batch_size: int,
    data_dir: str,
    num_workers: int,
    round_number: int = 0,
) -> Any:
    """Return the trainer's loader, which pads all samples to the sequence length.

    Args:
        config: Settings of the bundled trainer, as JSON.
        vocab_size: Tokens of the vocabulary.
        special_ids: Ids of special tokens, by their roles.
        micro_batch_size: Samples of a batch.
        data_dir: Directory of the dataset.
        num_workers: DataLoader workers of the rank.
        round_number: Number of the window's round, from 0, by which samples differ.
    """
    settings = TrainConfig.model_validate(config)
    samples = Samples(TokenDataset.open(Path(data_dir)), settings.seq_length_tokens)
    sampler: DistributedSampler[Any] = DistributedSampler(
        samples,
        num_replicas=int(os.environ.get("WORLD_SIZE", "1")),
        rank=int(os.environ.get("RANK", "0")),
        seed=settings.seed + round_number,
    )
    return DataLoader(
        samples,
        batch_size=micro_batch_size,
        sampler=sampler,
        drop_last=len(sampler) >= micro_batch_size,
        collate_fn=collator(
            vocab_size,
            SpecialIds.model_validate(special_ids),
            settings.seq_length_tokens,
            settings.masking_probability,
        ),
        num_workers=num_workers,
    )


def _step(
    config: TrainConfig,
    vocab_size: int,
    special_ids: SpecialIds,
    device: str,
    rendezvous: str | None,
) -> RecipeStep:
    """Return the trainer's step on this rank of those of torchrun's environment."""
    shape = config.model.config
    missing = [name for name in _SIZES if name not in shape]
    if missing:
        raise BadConfig(
            f"the paper's trainer requires {', '.join(missing)}, which the config of"
            f" {config.model.name} lacks",
            next_step="Compare other baselines, or name these sizes in the config.",
        )
    # Without TF32, as torch's defaults were.
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(config.seed)
    first_word = max(special_ids.all()) + 1
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    torch_device = torch.device(device)
    if device == "cuda":
        torch_device = torch.device(device, rank)
    model: nn.Module = RecipeModel(
        {name: int(shape[name]) for name in _SIZES},
        vocab_size,
        config.seq_length_tokens,
        first_word,
    ).to(torch_device)
    if world_size > 1:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{rendezvous}-paper",
            rank=rank,
            world_size=world_size,
        )
        model = nn.parallel.DistributedDataParallel(model)
    return RecipeStep(model, torch_device)
