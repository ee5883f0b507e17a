from pathlib import Path

import pytest

from autotune.cluster.site import (
    DEFAULT_SITE,
    NetworkSettings,
    SiteFile,
    SlurmSettings,
    find_site,
    job_variables,
    read_site,
)
from trainer.errors import BadConfig


def test_a_site_file_is_the_one_asked_for_else_the_environments_else_the_one_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_site(DEFAULT_SITE, {}) is None
    (tmp_path / "site.toml").write_text("")
    assert find_site(DEFAULT_SITE, {}) == Path("site.toml")
    assert find_site(DEFAULT_SITE, {"AUTOTUNE_SITE": "there.toml"}) == Path("there.toml")
    assert find_site("asked.toml", {"AUTOTUNE_SITE": "there.toml"}) == Path("asked.toml")


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:10:00", 600), ("1-02:00:00", 93600), ("4:00:00", 14400), ("100:00:00", 360000)]
)
def test_times_are_counted_in_seconds(text, seconds):
    assert SlurmSettings(time=text).time_s == seconds


def test_an_interface_is_told_to_both_libraries_and_a_sites_own_variables_come_last():
    assert job_variables(SiteFile()) == {}
    network = NetworkSettings(interface="ib0", nccl={"NCCL_SOCKET_IFNAME": "ib1", "NCCL_DEBUG": "WARN"})
    found = job_variables(SiteFile(network=network))
    assert found == {"NCCL_SOCKET_IFNAME": "ib1", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize(
    "text",
    [
        "acount = 1", '[slurm]\ntime = "soon"', '[slurm]\naccount = "a\\nb"', 'prologue = ["x\\ny"]',
        '[network.nccl]\n"A; rm" = "x"', "[slurm]\nterm_lead_s = 15",
    ],
)  # fmt: skip
def test_a_site_file_that_cannot_be_used_is_refused(tmp_path, text):
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(BadConfig):
        read_site(tmp_path / "site.toml")
