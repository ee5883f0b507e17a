"""A small step with its loader, and a training function, to tune for real."""

import torch
from torch.utils.data import DataLoader, Dataset

FEATURES = 64


class Samples(Dataset):
    """Samples that are equal to their number."""

    def __len__(self):
        return 4096

    def __getitem__(self, number):
        return torch.full((FEATURES,), float(number % 7))


def build_step(micro_batch_size, device, repeats=20):
    model = torch.nn.Linear(FEATURES, FEATURES, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    largest = torch.ones(micro_batch_size, FEATURES, device=device)

    def step(batch=largest):
        for _ in range(repeats):
            hidden = model(batch)
        (hidden - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_loader(num_workers, micro_batch_size):
    return DataLoader(
        Samples(),
        batch_size=micro_batch_size,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


def train(batch_size):
    step = build_step(batch_size, "cpu")
    for _ in range(1000):
        for batch in build_loader(0, batch_size):
            step(batch)
