import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autotune.core.network import GradientPart, Link, Network, RankCompute
from autotune.core.plan import Figure
from autotune.decide.scaling import USEFUL_EFFICIENCY, Load, exchanges
from autotune.decide.spread import Links, spread

DDP = exchanges(sixteen_bit=False)
TOKENS_PER_ROW = 500.0


def load(rows=1024, most=32, micro_batch_s=0.0):
    gradients = tuple(GradientPart(elements=1_000_000, ready_share=(number + 1) / 20) for number in range(20))
    compute = RankCompute(row_s=0.01, micro_batch_s=micro_batch_s, update_s=0.0, gradients=gradients)
    return Load(compute=compute, global_batch_rows=rows, real_tokens_per_row=TOKENS_PER_ROW, most_rows=most)


def links(slow=1e9, likely=1e9, fast=1e9, ranks=2):
    networks = [
        Network(nodes=2, ranks_per_node=ranks, between=Link(latency_s=2e-5, bytes_per_s=speed))
        for speed in (slow, likely, fast)
    ]
    return Links(worse=networks[0], likely=networks[1], better=networks[2], basis="assumed", source="lines")


def rate(value=50_000.0, share=0.0, basis="measured"):
    low, high = (value * (1 - share), value * (1 + share)) if share else (None, None)
    return Figure(value=value, low=low, high=high, confidence=0.95 if share else None, basis=basis, source="windows")


def test_one_node_is_as_many_ranks_as_it_has():
    found = spread(rate(share=0.1), load(), links(ranks=4), DDP, nodes=1)
    assert found.tokens_per_s.value == pytest.approx(200_000)
    assert found.tokens_per_s.low == pytest.approx(180_000)
    assert found.tokens_per_s.basis == "predicted"
    assert found.efficiency is None


def test_fewer_rows_than_ranks_are_no_training():
    assert spread(rate(), load(rows=7), links(), DDP, nodes=4) is None


@example(1000.0, 0.0, 104640566.0, 2.0, 2, 93)  # with better links a simpler exchange is as fast
@given(
    st.floats(1e3, 1e7), st.floats(0, 0.5), st.floats(1e7, 1e9), st.floats(1, 50), st.integers(2, 40),
    st.integers(80, 5000),
)  # fmt: skip
def test_all_ranks_are_within_bounds_and_never_faster_than_each_alone(tokens_per_s, share, slow, times, nodes, rows):
    found = spread(rate(tokens_per_s, share), load(rows), links(slow, slow * times**0.5, slow * times), DDP, nodes)
    total = found.tokens_per_s
    assert total.value <= 2 * nodes * tokens_per_s * (1 + 1e-9)
    assert 0 < found.efficiency.value <= 1
    assert total.value == pytest.approx(2 * nodes * tokens_per_s * found.efficiency.value)
    if total.low is not None:
        assert total.low <= total.value * (1 + 1e-9)
        assert total.value <= total.high * (1 + 1e-9)
        assert found.efficiency.low <= found.efficiency.value <= found.efficiency.high
    assert total.basis == "assumed"


def test_a_faster_rank_waits_longer_for_the_same_exchange():
    slow, fast = (spread(rate(value), load(), links(), DDP, 16).efficiency.value for value in (5e3, 5e5))
    assert slow > fast


def test_what_helps_is_named_where_something_is_wrong_and_only_there():
    wrong = spread(rate(5e5), load(rows=4096), links(), DDP, 16)
    assert wrong.efficiency.value < USEFUL_EFFICIENCY
    assert wrong.useful_nodes < 16
    assert {one.change for one in wrong.remedies} >= {"16-bit gradients", "twice the bandwidth between nodes"}
    assert all(one.efficiency > wrong.efficiency.value for one in wrong.remedies)
    strengths = [one.efficiency for one in wrong.remedies]
    assert strengths == sorted(strengths, reverse=True)
    enough = spread(rate(5e5), load(rows=4096 * wrong.enough_times), links(), DDP, 16)
    assert enough.efficiency.value >= USEFUL_EFFICIENCY
    assert enough.remedies == ()
    assert enough.useful_nodes is enough.enough_times is None


def test_gradients_that_travel_in_16_bits_already_are_no_remedy():
    found = spread(rate(5e5), load(), links(), exchanges(sixteen_bit=True), 16)
    assert "16-bit gradients" not in {one.change for one in found.remedies}
