"""Your own step is timed on one rank and on all, and more nodes are predicted."""

from dataclasses import replace

import pytest

from autotune.errors import NotCheckable, ProfileRejected
from autotune.evidence.network import Link
from autotune.network.own_step import predict_own
from autotune.network.stage import measure_network
from autotune.profiles.store import read_profile, write_profile
from testbed.examples.own_profiles import own_profile
from tests.autotune.baseline.own_profiles import (
    TUNED_SIZE,
    bench_of,
    own_code,
    request_in,
    write_own_profile,
)

PARAMETER_BYTES = 4 * (64 * 64 + 64)


def test_measures_ddp_step_on_two_ranks(tmp_path):
    path = tmp_path / "own.toml"
    with bench_of(own_code("build_step")) as bench:
        stored = write_own_profile(path, bench)
        request = request_in(tmp_path, local_ranks=2)
        found, _ = measure_network(stored, request, 1, bench=bench)
        with pytest.raises(NotCheckable, match="on one node"):
            measure_network(stored, request, 2, bench=bench)
    steps = found.on_ranks
    assert (found.ranks_per_node, steps.size) == (2, TUNED_SIZE)
    assert len(steps.one_rank_step_s) == len(steps.all_ranks_step_s) == 3
    assert (steps.gradient_bytes, steps.gradient_bytes_from) == (
        PARAMETER_BYTES,
        "optimizers",
    )
    assert steps.all_reduce_s > 0
    assert [link.scope for link in found.links] == ["within nodes"]
    written = read_profile(path)
    assert written.profile.evidence.network == found
    assert written.profile.provenance.commands[-1] == "network"
    slow = Link(latency_s=1e-3, bytes_per_s=1e6)
    scaled = predict_own(written, [1, 4], slow, None, "assumed")
    first, second = scaled.rows
    assert second.efficiency < first.efficiency
    assert any(source.startswith("assumed") for source in scaled.sources)
    with pytest.raises(NotCheckable, match="the link between nodes"):
        predict_own(written, [1, 4], None, None, "measured")


def test_prediction_requires_a_measured_step(tmp_path):
    path = tmp_path / "own.toml"
    with bench_of(own_code("build_step")) as bench:
        stored = write_own_profile(path, bench)
    unmeasured = replace(stored, profile=own_profile())
    with pytest.raises(ProfileRejected, match="no step on one rank"):
        predict_own(unmeasured, [2], None, None, "measured")


@pytest.mark.parametrize("where", ["--here", "--slurm"])
def test_command_rejects_several_nodes(workdir, says, where):
    write_profile(workdir / "own.toml", own_profile())
    words = ("network", "own.toml", "--nodes", "2", where, "--dry-run")
    assert "on one node" in says(*words[: 5 if where == "--here" else 6], code=7)
