"""Ranks that join once and run trial after trial: real torchrun, two ranks of this
host."""

import importlib.metadata
from dataclasses import replace

import pytest

from autotune.cluster.torchrun import on_this_node
from autotune.errors import MachineLacks
from autotune.network.decide.link_fit import link_warnings
from autotune.trials.multirank import MultirankMachine
from autotune.trials.values import (
    Crashed,
    GradientSyncFigures,
    LinkFigures,
    Measured,
    TimedOut,
    Trial,
)
from testbed.datasets import write_dataset
from testbed.simulators.hosts import hosts, together

LINKS = {
    "sizes_bytes": [4096, 65536],
    "repeats": 2,
    "seconds": 1.0,
    "nodes": 1,
    "ranks_per_node": 2,
}
SHAPE = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


def links(**changes):
    return Trial(job="links", measured=LINKS | changes, timeout_s=60.0)


def gradient_sync(data, *, synchronise=True, **parallel):
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


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    start = on_this_node(2, importlib.metadata.version("torch"))
    with MultirankMachine(
        start, "cpu", tmp_path_factory.mktemp("ranks") / "scratch"
    ) as machine:
        yield machine


@pytest.mark.system
def test_links_are_timed_within_the_node(two_ranks):
    figures = LinkFigures.of(two_ranks.run(links()))
    assert (figures.nodes, figures.ranks_per_node, figures.backend) == (1, 2, "gloo")
    assert sorted({size for size, _ in figures.within}) == LINKS["sizes_bytes"]
    assert all(seconds > 0 for _, seconds in figures.within)
    assert figures.between == ()
    assert len(figures.matmul_flops_per_s) == 2
    assert 0 <= figures.slowdown_share <= 1
    assert two_ranks.versions["torch"] == importlib.metadata.version("torch")


@pytest.mark.system
def test_steps_are_measured_with_and_without_gradients_that_travel(two_ranks, tmp_path):
    write_dataset(
        tmp_path / "data",
        [[5 + number % 90 for number in range(20)]] * 40,
        vocab_size=128,
    )
    runs = [
        two_ranks.run(gradient_sync(tmp_path / "data", synchronise=travels))
        for travels in (True, False)
    ]
    with_, without = map(GradientSyncFigures.of, runs)
    assert (with_.gradient_accumulation_steps, with_.micro_batch_size) == (2, 2)
    assert len(with_.step_s) == 2
    assert len(without.compute_s_by_rank) == 2
    shares = [ready for _, ready in without.gradients]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert sum(elements for elements, _ in without.gradients) == sum(
        elements for elements, _ in with_.gradients
    )
    assert with_.tokens_per_step > 0
    sharded = GradientSyncFigures.of(
        two_ranks.run(gradient_sync(tmp_path / "data", strategy="fsdp2"))
    )
    assert sharded.communication_s is None
    assert sharded.gradients == ()


@pytest.mark.system
def test_a_trial_that_fails_costs_only_itself(two_ranks, tmp_path):
    negative = two_ranks.run(links(sizes_bytes=[-4]))
    assert isinstance(negative, Crashed)
    assert "non-negative" in negative.detail
    assert isinstance(two_ranks.run(links(repeats=1)), Measured)


@pytest.mark.slow
@pytest.mark.system
def test_a_trial_that_takes_too_long_is_ended_with_all_its_ranks(tmp_path):
    start = on_this_node(2, importlib.metadata.version("torch"))
    with MultirankMachine(start, "cpu", tmp_path / "scratch") as machine:
        machine.start()
        late = Trial(
            job="links",
            measured=LINKS | {"repeats": 10**9, "seconds": 10**9},
            timeout_s=0.5,
        )
        assert isinstance(machine.run(late), TimedOut)
    assert not (tmp_path / "scratch").exists()


@pytest.mark.soak
@pytest.mark.system
def test_the_one_slow_link_of_three_hosts_is_named(tmp_path):
    scratch = tmp_path / "scratch"
    try:
        slow = hosts(3, 400_000_000, name="slowlink", slow={2: 40_000_000})
        with slow as found, together(found, scratch) as machine:
            figures = LinkFigures.of(
                machine.run(links(sizes_bytes=[4096, 2**20, 2**21]))
            )
    except MachineLacks as error:
        pytest.skip(f"no network namespaces here: {error.message}")
    assert (figures.nodes, figures.interface) == (3, "eth0")
    (warning,) = link_warnings(
        replace(figures, matmul_flops_per_s=(1.0, 1.0, 1.0)), None
    )
    assert "both links of node 2" in warning


@pytest.mark.parametrize(
    ("command", "said"),
    [("false", "could not be started"), ("no-such", "'no-such' not found")],
)
def test_ranks_that_cannot_start_say_why(tmp_path, command, said):
    machine = MultirankMachine(lambda arguments: [command], "cpu", tmp_path / "scratch")
    with pytest.raises(MachineLacks, match=said):
        machine.start()
