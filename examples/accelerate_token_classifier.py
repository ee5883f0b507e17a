"""A token classifier with Accelerate: train it, and let autotune find its batch size.

    python accelerate_token_classifier.py
    autotune probe --step accelerate_token_classifier:build_step --memory 1GB

Sentences are random words of random length, so that the example needs no download.
"""

import random

import torch
from accelerate import Accelerator
from transformers import BertConfig, BertForTokenClassification

from autotune.subjects.accelerate import accelerated_step, longest_batch

VOCABULARY, LABELS, LONGEST = 2000, 9, 128


class Sentences(torch.utils.data.Dataset):
    """Random words with a label each, the same in every process."""

    def __len__(self):
        return 4096

    def __getitem__(self, number):
        words = random.Random(number)
        ids = [words.randrange(1, VOCABULARY) for _ in range(words.randint(8, LONGEST))]
        return {"input_ids": ids, "labels": [one % LABELS for one in ids]}


def collate(samples):
    """Pad a micro-batch to its longest sentence."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids, labels = (
        torch.zeros(len(samples), longest, dtype=torch.long),
        torch.full((len(samples), longest), -100),
    )
    for row, sample in enumerate(samples):
        ids[row, : len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
        labels[row, : len(sample["labels"])] = torch.tensor(sample["labels"])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def make_parts():
    """Return the Accelerator, the model and its optimizer."""
    shape = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        num_labels=LABELS,
        max_position_embeddings=LONGEST,
    )
    model = BertForTokenClassification(shape)
    accelerator = Accelerator(
        gradient_accumulation_steps=2, cpu=not torch.cuda.is_available()
    )
    return accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def build_step(micro_batch_size, device):
    """Return what `autotune probe` tries."""
    return accelerated_step(
        *make_parts(), longest_batch(Sentences(), collate, micro_batch_size)
    )


def train(batch_size, steps=20):
    """Train for some optimizer steps."""
    accelerator, model, optimizer = make_parts()
    loader = torch.utils.data.DataLoader(Sentences(), batch_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if number + 1 >= steps * accelerator.gradient_accumulation_steps:
            return


if __name__ == "__main__":
    train(batch_size=8)
