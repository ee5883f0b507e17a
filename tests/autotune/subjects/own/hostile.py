"""Steps that misbehave, and one that does not."""

import contextlib
import os
import sys
import time

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

MIB = 2**20


def step_of(size, device="cpu", before=lambda: None):
    weight = torch.zeros(256, 256, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    batch = torch.ones(size * 64, 256, device=device)

    def step():
        before()
        (batch @ weight).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def behaves(micro_batch_size, device, seq_length=64):
    return step_of(micro_batch_size * seq_length // 64, device)


def hangs(micro_batch_size):
    return step_of(micro_batch_size, before=lambda: time.sleep(1000))


def exits(micro_batch_size):
    return step_of(micro_batch_size, before=lambda: sys.exit(3))


def vanishes(micro_batch_size):
    return step_of(micro_batch_size, before=lambda: os._exit(0))


def segfaults(micro_batch_size):
    return step_of(micro_batch_size, before=lambda: os.kill(os.getpid(), 11))


def raises(micro_batch_size):
    return step_of(micro_batch_size, before=lambda: 1 / 0)


def forks(micro_batch_size):
    def fork():
        # This copy continues as if it were the trial; its child is in another session.
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                os.execlp("sleep", "sleep", "1234.5")
            os._exit(0) if micro_batch_size % 2 else None

    return step_of(micro_batch_size, before=fork)


def prints(micro_batch_size):
    return step_of(micro_batch_size, before=lambda: print("{" * 100_000, flush=True))


def takes_host_memory(micro_batch_size):
    held = []
    return step_of(
        micro_batch_size,
        before=lambda: held.append(torch.ones(10 * 2**30, dtype=torch.uint8)),
    )


def leaks(micro_batch_size):
    held = []
    return step_of(micro_batch_size, before=lambda: held.append(torch.ones(4 * MIB)))


def varies(micro_batch_size):
    calls = []

    def before():
        calls.append(0)
        torch.ones((10 if len(calls) % 3 == 0 else 1) * MIB)

    return step_of(micro_batch_size, before=before)


def ignores(micro_batch_size):
    return step_of(8)


def critic(micro_batch_size, critic_steps=5):
    """Five small steps, then a large one of another optimizer, in one call."""
    small = step_of(1)
    large = step_of(micro_batch_size)

    def step():
        for _ in range(critic_steps):
            small()
        large()

    return step


def accumulates(micro_batch_size):
    """An optimizer step in every fourth call, which then has the optimizer's state
    beside the gradients."""
    weight = torch.zeros(2048, 512, requires_grad=True)
    batch = torch.ones(micro_batch_size * 64, 2048)
    calls = []
    optimizer = torch.optim.AdamW([weight])

    def step():
        calls.append((batch @ weight).sum().backward())
        if len(calls) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


def never_steps(micro_batch_size):
    weight = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    return lambda: weight.sum().backward(inputs=optimizer.param_groups[0]["params"])


def skips(micro_batch_size):
    weight = torch.zeros(256, 256, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])

    def step():
        with contextlib.suppress(RuntimeError):  # out of memory
            (torch.ones(micro_batch_size * 64, 256) @ weight).relu().sum().backward()
            optimizer.step()
        optimizer.zero_grad()

    return step


def of_a_small_dataset(micro_batch_size):
    return step_of(min(micro_batch_size, 100))


def grows_to_a_plateau(micro_batch_size):
    calls = []

    def before():
        calls.append(0)
        torch.ones(min(len(calls), 3) * 3 * MIB)

    return step_of(micro_batch_size, before=before)


def takes_a_batch(micro_batch_size):
    return lambda batch: None


def builds_nothing(micro_batch_size):
    return micro_batch_size


def trains(batch_size, steps=10**6):
    step = step_of(batch_size)
    for _ in range(steps):
        step()


def imports_late(micro_batch_size):
    import wave  # noqa: F401

    held = globals().setdefault("held", torch.ones(1))
    return step_of(micro_batch_size, before=lambda: held)


def data_parallel(micro_batch_size, wrap=torch.nn.parallel.DistributedDataParallel):
    """Train on all ranks together, which join as under torchrun."""
    torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(256, 256)
    model = wrap(model) or model
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(micro_batch_size * 64, 256)

    def step():
        model(batch).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(micro_batch_size):
    """The same with FSDP2, which shards the layer in place."""
    return data_parallel(micro_batch_size, fully_shard_in_place)


def fully_shard_in_place(model):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)


def lopsided(micro_batch_size):
    """The second rank has twice the batch of the first."""
    return data_parallel(micro_batch_size * (1 + int(os.environ["RANK"])))


def one_rank_raises(micro_batch_size):
    step = data_parallel(micro_batch_size)
    return step if os.environ["RANK"] == "0" else raises(micro_batch_size)


NUMBER = 3


class Sleepy(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, number):
        time.sleep(0.03)
        return torch.zeros(1000)


def sleepy(num_workers):
    return torch.utils.data.DataLoader(
        Sleepy(), batch_size=None, num_workers=num_workers
    )
