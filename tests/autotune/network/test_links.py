"""What is timed of messages, on a device whose clock is simulated."""

from types import SimpleNamespace

import pytest
import torch

from autotune.network.jobs import links
from autotune.network.values import LinksRequest

MESSAGE_S, START_S = 15e-6, 100e-6


def two_ranks(device):
    """The first of two ranks, each a node of its own."""
    return SimpleNamespace(
        device=torch.device(device),
        rank=0,
        local_rank=0,
        local_world_size=1,
        world_size=2,
        all_reduce_sum=lambda *values: list(values),
        all_reduce_max=lambda *values: list(values),
    )


@pytest.fixture
def clock(monkeypatch):
    """Seconds of a device that takes 0.1 ms to be asked and waited for, and 15 us for a
    message."""
    found = SimpleNamespace(now_s=0.0, messages=0, made=[])

    def travel(*_, **__):
        found.now_s += MESSAGE_S
        found.messages += 1

    def mark(device):
        found.now_s += START_S / 2
        at_s = found.now_s
        return SimpleNamespace(
            at_s=at_s,
            wait=lambda: None,
            seconds_since=lambda earlier: at_s - earlier.at_s,
        )

    monkeypatch.setattr(links, "mark", mark)
    monkeypatch.setattr(links.dist, "all_reduce", travel)
    monkeypatch.setattr(
        links.dist,
        "batch_isend_irecv",
        lambda sent: [SimpleNamespace(wait=travel) for _ in sent],
    )
    monkeypatch.setattr(links.dist, "P2POp", lambda *_: None)
    for name in ("zeros", "ones", "empty", "empty_like"):
        monkeypatch.setattr(
            links.torch, name, lambda size, device: found.made.append(found.messages)
        )
    return found


@pytest.mark.parametrize(("device", "off"), [("cuda", 0.15), ("cpu", 1.5)])
def test_the_time_to_start_and_wait_is_shared_by_messages_in_a_row(clock, device, off):
    ranks = two_ranks(device)
    asked = LinksRequest(
        sizes_bytes=[4096], repeats=6, seconds=3.0, nodes=2, ranks_per_node=1
    )
    found = links._all_reduces(None, asked, ranks, takes_part=True)
    assert [size for size, _ in found] == [4096] * 6
    assert [seconds for _, seconds in found] == pytest.approx([MESSAGE_S] * 6, rel=off)
    assert clock.messages == 2 + 6 * links.IN_A_ROW[device]
    assert links._all_reduces(None, asked, ranks, takes_part=False) == [(4096, 0.0)] * 6


def test_a_slow_network_is_not_asked_for_many_messages_in_a_row():
    assert [
        links._in_a_row(first_s, 3.0, 12, two_ranks("cuda"))
        for first_s in (1e-5, 0.04, 2.0)
    ] == [50, 6, 1]


def test_neighbours_swap_the_same_tensors_many_times_in_a_row(clock):
    (rate,) = links._neighbours(two_ranks("cuda"), 2, 3.0)
    assert clock.made == [0, 0]  # made before anything travelled
    # Two messages a swap; start and wait are a fifteenth of fifty swaps' time.
    assert rate == pytest.approx(64 * 2**20 / (2 * MESSAGE_S), rel=0.08)
    assert clock.messages == 2 * (1 + 3 * 50)
