"""Loaders and steps of your own code, good and bad ones, for windows."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from autotune.subjects.subject import StepFacts

LOAD_S = 0.03
"""Time that a worker takes for a sample."""
FEATURES = 64
LONG_QUEUE = 8
"""Prefetch factor with which ``prefetches`` is fast."""


class Sleepy(Dataset):
    """Dataset whose samples take ``LOAD_S`` each."""

    def __len__(self):
        return 100_000

    def __getitem__(self, number):
        time.sleep(LOAD_S)
        return torch.zeros(1000)


class Prefetched(Dataset):
    """Dataset whose samples take a tenth of the time with a long queue."""

    def __init__(self, prefetch_factor):
        self._load_s = LOAD_S / 10 if prefetch_factor == LONG_QUEUE else LOAD_S

    def __len__(self):
        return 100_000

    def __getitem__(self, number):
        time.sleep(self._load_s)
        return torch.zeros(1000)


def sleepy(num_workers):
    return DataLoader(Sleepy(), batch_size=None, num_workers=num_workers)


def prefetches(num_workers, prefetch_factor=None):
    """A loader that is fast with a long queue alone."""
    return DataLoader(
        Prefetched(prefetch_factor),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
    )


def fails_with_prefetching(num_workers, prefetch_factor=None):
    if prefetch_factor is not None:
        raise ValueError("no prefetching here")
    return sleepy(num_workers)


def locked(num_workers):
    """A loader that is slow in this process, however many workers it is given."""

    class Slow:
        def __iter__(self):
            while True:
                time.sleep(LOAD_S)
                yield torch.zeros(10)

    return Slow()


def short(num_workers):
    return [torch.zeros(8), torch.zeros(8), torch.zeros(8)]


def once(num_workers):
    return iter([torch.zeros(1)] * 3)


def empty(num_workers):
    return []


def not_iterable(num_workers):
    return num_workers


class Numbered(Dataset):
    """Samples of a rank, whose first feature is their number."""

    def __len__(self):
        return 10_000

    def __getitem__(self, number):
        sample = torch.ones(FEATURES)
        sample[0] = number
        return sample


def sharded(num_workers, micro_batch_size):
    """A loader of the samples of this rank alone."""
    sampler = torch.utils.data.DistributedSampler(
        Numbered(),
        num_replicas=int(os.environ["WORLD_SIZE"]),
        rank=int(os.environ["RANK"]),
        shuffle=False,
    )
    return DataLoader(
        Numbered(),
        batch_size=micro_batch_size,
        num_workers=num_workers,
        sampler=sampler,
    )


def plain_step(micro_batch_size, device="cpu"):
    weight = torch.zeros(FEATURES, FEATURES, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    batch = torch.ones(micro_batch_size, FEATURES, device=device)

    def step():
        (batch @ weight).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp_step(micro_batch_size):
    """A step under DDP, which joins its ranks as under torchrun.

    Each rank must get its own samples: every second one.
    """
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(batch):
        numbers = batch[:, 0].long()
        assert (numbers % dist.get_world_size() == dist.get_rank()).all(), numbers
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def work(batch):
        return {"units": len(batch), "model_flops": 6.0 * FEATURES * len(batch)}

    step.autotune_facts = StepFacts(work=work)
    return step


def trains(batch_size, steps=10**6):
    step = plain_step(batch_size)
    for _ in range(steps):
        step()


def builds_nothing(micro_batch_size):
    return micro_batch_size
