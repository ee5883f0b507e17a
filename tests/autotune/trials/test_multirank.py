"""Ranks that join once and run trial after trial: real torchrun, two local ranks."""

import importlib.metadata
from dataclasses import replace

import pytest

from autotune.cluster.torchrun import on_this_node
from autotune.errors import MachineLacks
from autotune.network.decide.link_fit import link_warnings
from autotune.trials.job_figures import GradientSyncFigures, LinkFigures
from autotune.trials.multirank import MultirankMachine
from autotune.trials.outcomes import Crashed, Measured, TimedOut
from autotune.trials.values import Trial
from testbed.datasets import write_dataset
from testbed.simulators.hosts import hosts, together

LINKS = {
    "sizes_bytes": [4096, 65536],
    "repeats": 2,
    "seconds": 1.0,
    "nodes": 1,
    "ranks_per_node": 2,
}
"""Measured input of a ``links`` job on two ranks of one node."""
LINK_BITS_PER_S = 400_000_000
SLOW_LINK_BITS_PER_S = 40_000_000
SHAPE = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


def links_trial(**changes):
    return Trial(job="links", measured=LINKS | changes, timeout_s=60.0)


def gradient_sync_trial(data, *, synchronise=True, **parallel):
    config = {
        "model": {"name": "tiny", "config": SHAPE},
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "seq_length_tokens": 32,
        "layout": "packed",
        "parallel": parallel,
    }
    measured = {
        "config": config,
        "steps": 2,
        "synchronise": synchronise,
        "round": 0,
        "nodes": 1,
        "ranks_per_node": 2,
    }
    return Trial(
        job="gradient_sync",
        measured=measured,
        local={"data_dir": str(data)},
        timeout_s=90.0,
    )


def elements_of_gradients(figures: GradientSyncFigures) -> int:
    """Return the number of elements of all gradients."""
    return sum(elements for elements, _ in figures.gradients)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write a dataset of 40 documents of 20 tokens each."""
    directory = tmp_path_factory.mktemp("dataset") / "data"
    document = list(range(5, 25))
    write_dataset(directory, [document] * 40, vocab_size=128)
    return directory


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Two local ranks that torchrun starts once for all tests of this file."""
    start = on_this_node(2, importlib.metadata.version("torch"))
    with MultirankMachine(
        start, "cpu", tmp_path_factory.mktemp("ranks") / "scratch"
    ) as machine:
        yield machine


@pytest.mark.system
def test_times_links_within_the_node(two_ranks):
    figures = LinkFigures.of(two_ranks.run(links_trial()))
    assert figures.nodes == 1
    assert figures.ranks_per_node == 2
    assert figures.backend == "gloo"
    assert sorted({size for size, _ in figures.within}) == LINKS["sizes_bytes"]
    assert all(seconds > 0 for _, seconds in figures.within)
    assert figures.between == ()
    assert len(figures.matmul_flops_per_s) == 2
    assert 0 <= figures.slowdown_share <= 1
    assert two_ranks.versions["torch"] == importlib.metadata.version("torch")


@pytest.fixture(scope="module")
def synchronised(two_ranks, data) -> GradientSyncFigures:
    """Figures of steps that synchronise their gradients."""
    return GradientSyncFigures.of(two_ranks.run(gradient_sync_trial(data)))


@pytest.fixture(scope="module")
def alone(two_ranks, data) -> GradientSyncFigures:
    """Figures of the same steps without synchronisation."""
    trial = gradient_sync_trial(data, synchronise=False)
    return GradientSyncFigures.of(two_ranks.run(trial))


@pytest.mark.system
def test_times_steps_with_synchronisation(synchronised):
    # The global batch of 8 sequences is shared by two ranks, two sequences at a time.
    assert synchronised.gradient_accumulation_steps == 2
    assert synchronised.micro_batch_size == 2
    assert synchronised.tokens_per_step > 0
    assert len(synchronised.step_s) == 2


@pytest.mark.system
def test_times_compute_of_each_rank_without_synchronisation(alone):
    assert len(alone.compute_s_by_rank) == 2


@pytest.mark.system
def test_gradients_are_in_order_of_readiness(alone):
    ready_shares = [share for _, share in alone.gradients]
    assert ready_shares == sorted(ready_shares)
    assert ready_shares[-1] == pytest.approx(1.0)


@pytest.mark.system
def test_gradients_are_the_same_without_synchronisation(alone, synchronised):
    assert elements_of_gradients(alone) == elements_of_gradients(synchronised)


@pytest.mark.system
def test_sharded_gradients_cannot_be_timed(two_ranks, data):
    sharded = GradientSyncFigures.of(
        two_ranks.run(gradient_sync_trial(data, strategy="fsdp2"))
    )
    assert sharded.communication_s is None
    assert sharded.gradients == ()


@pytest.mark.system
def test_failed_trial_does_not_affect_the_next(two_ranks):
    # torch rejects a tensor of negative size.
    crashed = two_ranks.run(links_trial(sizes_bytes=[-4]))
    assert isinstance(crashed, Crashed)
    assert "non-negative" in crashed.detail
    assert isinstance(two_ranks.run(links_trial(repeats=1)), Measured)


@pytest.mark.slow
@pytest.mark.system
def test_trial_beyond_its_limit_ends_all_ranks(tmp_path):
    scratch = tmp_path / "scratch"
    start = on_this_node(2, importlib.metadata.version("torch"))
    with MultirankMachine(start, "cpu", scratch) as machine:
        machine.start()
        endless = replace(
            links_trial(repeats=10**9, seconds=10**9),
            timeout_s=0.5,
        )
        assert isinstance(machine.run(endless), TimedOut)
    assert not scratch.exists()


@pytest.mark.soak
@pytest.mark.system
def test_names_the_one_slow_link_of_three_hosts(tmp_path):
    last_host = 2
    simulated_hosts = hosts(
        3, LINK_BITS_PER_S, name="slowlink", slow={last_host: SLOW_LINK_BITS_PER_S}
    )
    try:
        with simulated_hosts as names, together(names, tmp_path / "scratch") as machine:
            trial = links_trial(sizes_bytes=[4096, 2**20, 2**21])
            figures = LinkFigures.of(machine.run(trial))
    except MachineLacks as error:
        pytest.skip(f"no network namespaces here: {error.message}")
    assert figures.nodes == 3
    assert figures.interface == "eth0"
    equal_gpus = replace(figures, matmul_flops_per_s=(1.0, 1.0, 1.0))
    (warning,) = link_warnings(equal_gpus, None)
    assert "both links of node 2" in warning


@pytest.mark.parametrize(
    ("command", "message"),
    [
        pytest.param("false", "could not be started", id="ends at once"),
        pytest.param("no-such", "'no-such' not found", id="does not exist"),
    ],
)
def test_ranks_that_cannot_start_give_the_reason(tmp_path, command, message):
    machine = MultirankMachine(lambda arguments: [command], "cpu", tmp_path / "scratch")
    with pytest.raises(MachineLacks, match=message):
        machine.start()
