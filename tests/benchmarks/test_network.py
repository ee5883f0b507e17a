import pytest

from benchmarks import golden_network, useful_nodes
from benchmarks.network import make_bars
from testbed.simulators.cluster import CLUSTERS, MODELS, Simulator


@pytest.mark.parametrize("bar", golden_network.bars(), ids=lambda bar: bar.name)
def test_arithmetic_consequences_hold(bar):
    assert bar.holds, bar.line


def test_16_bit_gradients_recover_most_speed():
    shares = golden_network.ddp_with_accumulation_3()
    assert shares["fp32 gradients"] == pytest.approx(0.714, abs=0.01)
    assert shares["bf16 gradients"] == pytest.approx(0.916, abs=0.01)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
def test_recovers_simulated_links(cluster):
    (case,) = useful_nodes.run(MODELS[3:], [cluster])
    assert abs(case.predicted - case.true) <= 1
    _, network = useful_nodes.observed(Simulator(MODELS[0], cluster, seed=5))
    assert network.between.bytes_per_s == pytest.approx(
        cluster.inter_bytes_per_s, rel=1e-3
    )
    assert network.between.latency_s == pytest.approx(cluster.inter_latency_s, rel=1e-2)


def test_worst_error_counts():
    rows = [
        {"hosts": 2, "predicted_s": predicted_s, "measured_s": 1.0}
        for predicted_s in (1.0, 0.9)
    ]
    none, some = (
        {
            bar.name: bar
            for bar in make_bars(
                {"predicted": predicted, "chosen": [], "useful_nodes": []}
            )
        }
        for predicted in ([], rows)
    )
    worst = "network_worst_step_error_2_hosts_share"
    assert none[worst].holds is none["network_chosen_to_default_ratio"].holds is None
    assert (some[worst].figure, some[worst].holds) == (pytest.approx(0.1), False)


def test_predicts_the_papers_cluster():
    for case in useful_nodes.run_far(MODELS[:1]):
        assert case["predicted_s"] == pytest.approx(case["simulated_s"], rel=0.03)
        assert 0 < case["efficiency_at_16384_gpus"] <= case["efficiency"] <= 1
