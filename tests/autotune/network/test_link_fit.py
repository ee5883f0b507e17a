import random

import pytest

from autotune.network.decide.link_fit import (
    fit_link,
    link_warnings,
    lost_share,
    nccl_transport,
)
from autotune.trials.job_figures import LinkFigures

SIZES = tuple(2**exponent for exponent in range(12, 27, 2))


def times(latency_s, bytes_per_s, members, *, noise=0.0, repeats=8, seed=0):
    draw = random.Random(seed)
    hops = 2 * (members - 1)
    return [
        (
            size,
            hops
            * (latency_s + size / members / bytes_per_s)
            * (1 + noise * draw.gauss(0, 1)),
        )
        for size in SIZES
        for _ in range(repeats)
    ]


@pytest.mark.parametrize(
    ("members", "trees"), [(2, False), (4, False), (16, False), (16, True)]
)
def test_fit_recovers_a_link(members, trees):
    fit = fit_link(times(30e-6, 2.5e9, members), members, trees=trees)
    # Down a tree a small message takes 8 hops of 16 nodes, instead of 30.
    assert fit.latency_s == pytest.approx(30e-6 * (30 / 8 if trees else 1), rel=1e-3)
    assert fit.bytes_per_s == pytest.approx(2.5e9, rel=1e-3)
    assert fit.worst_error_share < 1e-3


def test_noise_widens_the_interval():
    fit = fit_link(times(30e-6, 2.5e9, 4, noise=0.05), 4)
    low = fit.bytes_per_s_low
    high = fit.bytes_per_s_high
    assert low < 2.5e9 < high
    assert [link.bytes_per_s for link in fit.ends] == [low, high]
    assert high / low < 1.2


def test_ignores_an_outlier():
    outlier = times(30e-6, 2.5e9, 2)
    outlier[-1] = (outlier[-1][0], 10 * outlier[-1][1])
    assert fit_link(outlier, 2).bytes_per_s == pytest.approx(2.5e9, rel=1e-3)


def test_ignores_the_burst_of_a_shaped_link():
    # A shaped link lets the first 256 KiB after a rest through at once.
    lent = [
        (size, max(1e-3, seconds - 2**18 / 24e6))
        for size, seconds in times(1e-4, 24e6, 2)
    ]
    assert fit_link(lent, 2).bytes_per_s == pytest.approx(24e6, rel=0.01)


def test_unrepeated_sizes_add_nothing():
    fit = fit_link([*times(30e-6, 2.5e9, 2, repeats=4), (2**28, 10.0)], 2)
    once = fit_link(times(30e-6, 2.5e9, 2, repeats=1), 2)
    assert [fit.bytes_per_s, once.bytes_per_s] == pytest.approx([2.5e9] * 2, rel=1e-3)
    assert (once.bytes_per_s_low, once.latency_s_high, once.ends) == (None, None, None)


def test_too_few_messages_fit_no_line():
    for message_times, members in (([(4096, 1e-4)], 2), (times(1e-5, 1e9, 2), 1)):
        with pytest.raises(ValueError, match="too few to fit a line"):
            fit_link(message_times, members)


def warnings(neighbours=(), matmuls=(1.0, 1.0), *, reached=None, rated=None):
    links = LinkFigures(
        all=(),
        within=(),
        between=(),
        neighbours_bytes_per_s=neighbours,
        matmul_flops_per_s=matmuls,
        nodes=2,
        ranks_per_node=2,
        backend="gloo",
        transport="TCP",
        interface="eth0",
        interface_bytes_per_s=rated,
    )
    return link_warnings(links, reached)


def test_warns_of_slow_links_or_ranks():
    (link,) = warnings([10.0, 3.0, 10.0, 9.5])
    assert "between nodes 1 and 2 has 30 %" in link
    (node,) = warnings([10.0, 3.0, 2.0])
    assert "both links of node 2 have 30 %" in node
    (rank,) = warnings(matmuls=[1.0, 1.0, 1.0, 0.5])
    assert "rank 3 (node 1, local rank 1)" in rank


def test_warns_of_an_unreached_interface_rate():
    (interface,) = warnings(reached=1e9, rated=3.125e9)
    assert "32 %" in interface
    assert "25 Gbit/s" in interface
    assert warnings([10.0, 10.0], reached=2.5e9, rated=3.125e9) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "NET/Socket : Using [0]ens3:10.0.0.4<0>",
            ("TCP sockets (NCCL NET/Socket)", "ens3"),
        ),
        (
            "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.1.0.4<0>",
            ("InfiniBand or RoCE (NCCL NET/IB)", "mlx5_0"),
        ),
        ("comm 0x1 rank 0 nranks 2 - Init COMPLETE", None),
    ],
)
def test_reads_transport_from_nccl_log(line, expected):
    assert nccl_transport(f"n1:7:9 [0] NCCL INFO {line}") == expected


def test_measures_compute_lost_to_a_message():
    alone_s = 40e-6
    for slowed in (1.0, 1.25, 2.0):
        ended_s = [(number + 1) * alone_s * slowed for number in range(300)]
        assert lost_share(ended_s, 3.3e-3, alone_s) == pytest.approx(
            1 - 1 / slowed, abs=1e-9
        )


def test_message_outlasting_all_matmuls_is_measured():
    # A message that outlasts all matmuls is judged by those that ran beside it, and one
    # beside which nothing ran is not judged.
    assert lost_share([50e-6, 100e-6], 1e-3, 40e-6) == pytest.approx(0.2)
    assert lost_share([], 1e-3, 40e-6) == lost_share([50e-6], 0.0, 40e-6) == 0
