import re

import pytest

from trainer.formats.code_hash import code_sha256
from trainer.formats.profile_file import profile_sha256, read_profile_tables


@pytest.fixture
def preflight(workdir_with_data, monkeypatch):
    """Return the preflight command of a node that matches the profile."""
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    return [
        "job",
        "preflight",
        "p.toml",
        "--data",
        "data",
        "--ranks",
        "1",
        "--cpus",
        "1",
        "--code",
        code_sha256(),
    ]


def test_matching_node_prints_one_line(preflight, says):
    out = says(*preflight)
    assert out.startswith("preflight: n7: ")
    assert out.count("\n") == 1


@pytest.mark.parametrize(
    ("field", "value"), [("code", "0" * 64), ("data", "."), ("cpus", "4096")]
)
def test_mismatching_node_is_named(preflight, says, field, value):
    preflight[preflight.index(f"--{field}") + 1] = value
    err = says(*preflight, code=6)
    assert "error: n7: " in err
    assert field in err


def test_job_commands_are_hidden(says):
    assert "job" not in [
        line.split()[0] for line in says("--help").splitlines() if line.strip()
    ]


def test_finds_address_of_the_node(says):
    assert "network.interface" in says("job", "address", "--interface", "none9", code=5)
    address, port = says("job", "meet", "--job", "12").strip().split(":")
    assert re.fullmatch(re.escape(address) + r" \S+", says("job", "address").strip())
    assert 20000 <= int(port) < 30000


def test_changed_profile_fails_its_waiting_job(preflight, says, workdir_with_data):
    profile = workdir_with_data / "p.toml"
    approve = ["profile", "approve", "p.toml", "--by", "reviewer", "--as-edited"]
    preflight += [
        "--require-approved",
        "--profile-sha256",
        profile_sha256(read_profile_tables(profile)),
    ]
    assert "is not approved (hash" in says(*preflight, code=6)
    says(*approve)
    says(*preflight)
    profile.write_text(
        profile.read_text().replace("micro_batch_size = 2", "micro_batch_size = 1")
    )
    assert "was modified since" in says(*preflight, code=6)
    says(*approve)
    assert "the job was written for" in says(*preflight, code=6)
