"""Predicted steps of your own code grow with the nodes and the gradients."""

import pytest

from autotune.evidence.network import Link, Network
from autotune.network.decide.own_scaling import predict_nodes

NETWORK = Network(
    nodes=1,
    ranks_per_node=1,
    between=Link(latency_s=1e-5, bytes_per_s=1e8),
    trees=False,
)


def rows(gradient_bytes, counts=(1, 2, 8)):
    return predict_nodes(0.1, gradient_bytes, 32.0, NETWORK, counts)


def test_one_node_of_one_rank_synchronises_nothing():
    (alone,) = rows(4 * 10**8, (1,))
    assert alone.step_s == pytest.approx(0.1)
    assert alone.efficiency == pytest.approx(1.0)
    assert alone.units_per_s == pytest.approx(320.0)


def test_more_nodes_are_less_efficient():
    alone, two, eight = rows(4 * 10**8)
    assert alone.efficiency > two.efficiency > eight.efficiency
    assert eight.units_per_s > two.units_per_s


def test_larger_gradients_cost_more():
    (small,), (large,) = rows(4 * 10**6, (8,)), rows(4 * 10**9, (8,))
    assert large.step_s > small.step_s
