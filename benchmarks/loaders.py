"""Loaders whose number of workers is known: sleeping ones, and one that tokenises."""

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import torch

WORDS = 2000


class Sleeping(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that take a given time without using the CPU."""

    def __init__(self, sleep_s: float) -> None:
        self._sleep_s = sleep_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> torch.Tensor:
        time.sleep(self._sleep_s)
        return torch.zeros(16)


def sleeping(num_workers: int, sleep_s: float) -> Any:
    """Return a loader whose batches of one sample take ``sleep_s`` each."""
    return torch.utils.data.DataLoader(
        Sleeping(sleep_s), batch_size=None, num_workers=num_workers
    )


class Tokenised(torch.utils.data.IterableDataset[torch.Tensor]):
    """Endless text, tokenised as it is read."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        import os

        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocabulary = {f"w{number}": number for number in range(WORDS)} | {"?": WORDS}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        worker = torch.utils.data.get_worker_info()
        draw = random.Random(0 if worker is None else worker.id)
        texts = [
            " ".join(f"w{draw.randrange(WORDS)}" for _ in range(512)) for _ in range(64)
        ]
        for text in itertools.cycle(texts):
            yield torch.tensor(tokenizer.encode(text).ids)


def tokenised(num_workers: int) -> Any:
    """Return a loader of batches of eight tokenised texts."""
    return torch.utils.data.DataLoader(
        Tokenised(), batch_size=8, num_workers=num_workers
    )


def tokenised_rates(seconds: float = 3.0) -> dict[int, float]:
    """Return the batches per second that each number of workers delivers.

    Nothing else runs meanwhile.
    """
    rates = {}
    for workers in (0, 1, 2):
        batches = iter(tokenised(workers))
        for _ in range(4 * max(1, workers)):
            next(batches)
        began_s, count = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds:
            next(batches)
            count += 1
        rates[workers] = count / (time.perf_counter() - began_s)
        del batches
    return rates
