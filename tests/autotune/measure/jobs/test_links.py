"""What is timed of messages, on a device whose clock is simulated."""

from dataclasses import dataclass, field

import pytest
import torch

from autotune.measure.jobs import links

MESSAGE_S, START_S = 15e-6, 100e-6


@dataclass
class Clock:
    """Seconds of a device that takes 0.1 ms to be asked and waited for, and 15 us for a message."""

    now_s: float = 0.0
    messages: int = 0
    made: list[int] = field(default_factory=list)


class Moment:
    def __init__(self, clock):
        clock.now_s += START_S / 2
        self.moment = clock.now_s

    def wait(self):
        pass

    def seconds_since(self, earlier):
        return self.moment - earlier.moment


@dataclass
class FakeRanks:
    """The first of two ranks, each a node of its own."""

    device: object
    rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    world_size: int = 2

    def sum(self, *values):
        return list(values)

    def max(self, *values):
        return list(values)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()

    def travel(*_, **__):
        found.now_s += MESSAGE_S
        found.messages += 1

    class Work:
        def wait(self):
            travel()

    monkeypatch.setattr(links, "mark", lambda device: Moment(found))
    monkeypatch.setattr(links.dist, "all_reduce", travel)
    monkeypatch.setattr(links.dist, "batch_isend_irecv", lambda operations: [Work() for _ in operations])
    monkeypatch.setattr(links.dist, "P2POp", lambda *_: None)

    def tensor(size, device):
        found.made.append(found.messages)

    for name in ("zeros", "ones", "empty", "empty_like"):
        monkeypatch.setattr(links.torch, name, tensor)
    return found


@pytest.mark.parametrize(("device", "off"), [("cuda", 0.15), ("cpu", 1.5)])
def test_the_time_to_start_and_wait_is_shared_by_messages_in_a_row(clock, device, off):
    ranks = FakeRanks(torch.device(device))
    found = links._all_reduces(None, [4096], 6, 3.0, ranks, takes_part=True)
    assert [size for size, _ in found] == [4096] * 6
    assert [seconds for _, seconds in found] == pytest.approx([MESSAGE_S] * 6, rel=off)
    assert clock.messages == 2 + 6 * links.IN_A_ROW[device]
    assert links._all_reduces(None, [4096], 6, 3.0, ranks, takes_part=False) == [(4096, 0.0)] * 6


def test_a_slow_network_is_not_asked_for_many_messages_in_a_row():
    ranks = FakeRanks(torch.device("cuda"))
    assert links._in_a_row(1e-5, 3.0, 12, ranks) == 50
    assert links._in_a_row(0.04, 3.0, 12, ranks) == 6
    assert links._in_a_row(2.0, 3.0, 12, ranks) == 1


def test_neighbours_swap_the_same_tensors_many_times_in_a_row(clock):
    (rate,) = links._neighbours(FakeRanks(torch.device("cuda")), 2, 3.0)
    assert clock.made == [0, 0]  # made before anything travelled
    # Two messages a swap; start and wait are a fifteenth of fifty swaps' time.
    assert rate == pytest.approx(64 * 2**20 / (2 * MESSAGE_S), rel=0.08)
    assert clock.messages == 2 * (1 + 3 * 50)
