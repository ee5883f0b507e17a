"""Hugging Face Trainer: ``--subject transformers --step hf_trainer:make_trainer``."""

import os

import torch
from small_training import Network, Samples, collate
from transformers import Trainer, TrainingArguments


def make_trainer(strategy="ddp"):
    """Return the Trainer, as before ``train()``."""
    distributed = {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.cuda.is_available():
        distributed["ddp_backend"] = "gloo"
    if strategy == "fsdp2":
        distributed |= {"fsdp": "full_shard", "fsdp_config": {"version": 2}}
    arguments = TrainingArguments(
        output_dir="runs",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        **distributed,
    )
    return Trainer(Network(), arguments, train_dataset=Samples(), data_collator=collate)
