"""One suite for every host."""

from pathlib import Path

import pytest

from autotune.measure.host import LIBRARIES, SystemHost
from autotune.show.answers import plain
from tests.fakes import FakeHost


@pytest.fixture(params=["system", "fake"])
def host(request):
    return SystemHost() if request.param == "system" else FakeHost(versions={"numpy": "2.0"})


def test_there_is_one_disk_per_path_in_order(host, tmp_path):
    paths = [tmp_path, Path(), tmp_path / "not" / "there"]
    assert [disk.path for disk in host.facts(paths).disks] == [str(path) for path in paths]


def test_no_paths_means_no_disks(host):
    assert host.facts([]).disks == ()


def test_allotted_cpus_exist(host):
    facts = host.facts([])
    assert 1 <= facts.allotted_cpus <= facts.cpus_online


def test_available_memory_is_part_of_all_memory(host):
    facts = host.facts([])
    assert 0 <= facts.ram_available_bytes <= facts.ram_total_bytes
    assert facts.ram_limit_source


def test_facts_become_plain_json(host):
    content = plain(host.facts([Path()]))
    assert content["cpus_online"] >= 1
    assert content["disks"][0]["path"] == "."


def test_versions_are_of_known_libraries(host):
    versions = host.library_versions()
    assert "numpy" in versions
    assert set(versions) <= set(LIBRARIES)
