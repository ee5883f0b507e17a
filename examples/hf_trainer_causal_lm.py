"""A causal language model with Hugging Face Trainer: train it, and tune it.

    python hf_trainer_causal_lm.py
    autotune probe --step hf_trainer_causal_lm:build_step --memory 1GB
    autotune workers profiles/hf_trainer_causal_lm-cpu.toml \
        --loader hf_trainer_causal_lm:build_loader

autotune finds its batch size and its number of workers. The text is random words of
random length, so that the example needs no download.
"""

import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from autotune.subjects.transformers import trainer_loader, trainer_step

VOCABULARY, LONGEST = 2000, 128


class Lines(torch.utils.data.Dataset):
    """Lines of random words, the same in every process."""

    def __init__(self, count=4096):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        words = random.Random(number)
        length = words.randint(8, LONGEST)
        return {"input_ids": [words.randrange(1, VOCABULARY) for _ in range(length)]}


def collate(samples):
    """Pad a micro-batch to its longest line."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": ids.masked_fill(ids == 0, -100),
    }


def make_trainer(**settings):
    """Return the Trainer of this program."""
    shape = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=128, n_layer=4, n_head=4
    )
    arguments = TrainingArguments(
        output_dir="runs/causal-lm",
        learning_rate=5e-4,
        max_steps=20,
        logging_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        **settings,
    )
    return Trainer(
        GPT2LMHeadModel(shape), arguments, train_dataset=Lines(), data_collator=collate
    )


def build_step(micro_batch_size, device):
    """Return what `autotune probe` tries."""
    return trainer_step(make_trainer(), micro_batch_size, device)


def build_loader(num_workers):
    """Return what `autotune workers` tries."""
    return trainer_loader(make_trainer(), num_workers)


if __name__ == "__main__":
    make_trainer(per_device_train_batch_size=8).train()
