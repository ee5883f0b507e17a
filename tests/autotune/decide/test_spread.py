import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.network import GradientPart, Link, Network, RankCompute
from autotune.core.plan import PlanFigure
from autotune.decide.scaling import USEFUL_EFFICIENCY, Load, exchanges
from autotune.decide.spread import AllRanks, spread

DDP = exchanges(sixteen_bit=False)
TOKENS_PER_ROW = 500.0


def load_of(rows=1024, most=32, micro_batch_s=0.0):
    gradients = tuple(GradientPart(elements=1_000_000, ready_share=(number + 1) / 20) for number in range(20))
    compute = RankCompute(row_s=0.01, micro_batch_s=micro_batch_s, update_s=0.0, gradients=gradients)
    return Load(compute=compute, global_batch_rows=rows, real_tokens_per_row=TOKENS_PER_ROW, most_rows=most)


def network(bytes_per_s=1e9, ranks=2):
    return Network(nodes=2, ranks_per_node=ranks, between=Link(latency_s=2e-5, bytes_per_s=bytes_per_s))


def spread_of(rate, nodes, load=None, over=None, among=DDP):
    return spread(rate, load or load_of(), over or network(), among=among, nodes=nodes, links=("assumed", "lines"))


def rate(value=50_000.0, share=0.0, basis="measured"):
    low, high = (value * (1 - share), value * (1 + share)) if share else (None, None)
    return PlanFigure(
        value=value, low=low, high=high, confidence=0.95 if share else None, basis=basis, source="windows"
    )


def test_one_node_is_as_many_ranks_as_it_has():
    found = spread_of(rate(share=0.1), 1, over=network(ranks=4))
    assert found.tokens_per_s.value == pytest.approx(200_000)
    assert found.tokens_per_s.low == pytest.approx(180_000)
    assert found.tokens_per_s.basis == "predicted"
    assert found.efficiency is None
    assert found.efficiency_by_nodes == {}


def test_fewer_rows_than_ranks_are_no_training():
    assert spread_of(rate(), 4, load_of(rows=7)) == AllRanks()


@given(st.floats(1e3, 1e7), st.floats(0, 0.5), st.floats(1e7, 1e9), st.integers(2, 40), st.integers(80, 5000))
def test_all_ranks_are_never_faster_than_each_alone_and_keep_the_rates_interval(tokens, share, speed, nodes, rows):
    found = spread_of(rate(tokens, share), nodes, load_of(rows), network(speed))
    total, efficiency = found.tokens_per_s, found.efficiency.value
    assert 0 < efficiency <= 1
    assert total.value == pytest.approx(2 * nodes * tokens * efficiency)
    if share:
        assert [total.low, total.high] == pytest.approx([(1 - share) * total.value, (1 + share) * total.value])
        assert total.confidence == 0.95
    else:
        assert total.low is None
    assert total.basis == found.efficiency.basis == "assumed"
    assert found.efficiency.low is None
    assert found.efficiency_by_nodes[nodes] == pytest.approx(efficiency)
    assert list(found.efficiency_by_nodes) == sorted(found.efficiency_by_nodes)


def test_a_faster_rank_waits_longer_for_the_same_exchange():
    slow, fast = (spread_of(rate(value), 16).efficiency.value for value in (5e3, 5e5))
    assert slow > fast


def test_how_many_nodes_are_useful_is_said_where_they_are_not_all_and_only_there():
    wrong = spread_of(rate(5e5), 16, load_of(rows=4096))
    assert wrong.efficiency.value < USEFUL_EFFICIENCY
    assert wrong.useful_nodes < 16
    assert set(wrong.efficiency_by_nodes) == {1, wrong.useful_nodes, 16}
    enough = spread_of(rate(5e5), 16, load_of(rows=4096 * 64))
    assert enough.efficiency.value >= USEFUL_EFFICIENCY
    assert enough.useful_nodes is None
    assert set(enough.efficiency_by_nodes) == {1, 8, 16}
