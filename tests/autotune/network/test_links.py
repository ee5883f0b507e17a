"""Timing of messages, on a device whose clock is simulated."""

from types import SimpleNamespace

import pytest
import torch

from autotune.network.jobs import links
from autotune.network.values import LinksRequest

MESSAGE_S = 15e-6
START_S = 100e-6


def two_ranks(device):
    """Return the first of two ranks, each on its own node."""
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
    """A device that takes 0.1 ms to start and wait for, and 15 us for a message."""
    simulated = SimpleNamespace(now_s=0.0, messages=0, made=[])

    def travel(*_, **__):
        simulated.now_s += MESSAGE_S
        simulated.messages += 1

    def mark(device):
        simulated.now_s += START_S / 2
        at_s = simulated.now_s
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
            links.torch,
            name,
            lambda size, device: simulated.made.append(simulated.messages),
        )
    return simulated


@pytest.mark.parametrize(("device", "tolerance"), [("cuda", 0.15), ("cpu", 1.5)])
def test_messages_in_a_row_share_start_time(clock, device, tolerance):
    ranks = two_ranks(device)
    request = LinksRequest(
        sizes_bytes=[4096], repeats=6, seconds=3.0, nodes=2, ranks_per_node=1
    )
    messages = links._all_reduces(None, request, ranks, takes_part=True)
    assert [size for size, _ in messages] == [4096] * 6
    assert [seconds for _, seconds in messages] == pytest.approx(
        [MESSAGE_S] * 6, rel=tolerance
    )
    assert clock.messages == 2 + 6 * links.IN_A_ROW[device]
    assert (
        links._all_reduces(None, request, ranks, takes_part=False) == [(4096, 0.0)] * 6
    )


def test_slow_network_sends_fewer_messages_in_row():
    assert [
        links._in_a_row(first_s, 3.0, 12, two_ranks("cuda"))
        for first_s in (1e-5, 0.04, 2.0)
    ] == [50, 6, 1]


def test_neighbours_swap_the_same_tensors(clock):
    (rate,) = links._neighbours(two_ranks("cuda"), 2, 3.0)
    assert clock.made == [0, 0]  # made before anything travelled
    # Two messages a swap; start and wait are a fifteenth of fifty swaps' time.
    assert rate == pytest.approx(64 * 2**20 / (2 * MESSAGE_S), rel=0.08)
    assert clock.messages == 2 * (1 + 3 * 50)
