"""One suite for every host."""

from pathlib import Path

import pytest

from autotune.measure.host import LIBRARIES, SystemHost
from autotune.show.answers import plain
from tests.fakes import FakeHost


@pytest.fixture(params=["system", "fake"])
def host(request):
    return SystemHost() if request.param == "system" else FakeHost(versions={"numpy": "2.0"})


def test_facts_are_possible_and_become_plain_json_with_one_disk_per_path_in_order(host, tmp_path):
    paths = [tmp_path, Path(), tmp_path / "not" / "there"]
    facts = host.facts(paths)
    assert [disk.path for disk in facts.disks] == [str(path) for path in paths]
    assert 1 <= facts.allotted_cpus <= facts.cpus_online
    assert 0 <= facts.ram_available_bytes <= facts.ram_total_bytes
    assert facts.ram_limit_source
    content = plain(facts)
    assert (content["cpus_online"], content["disks"][1]["path"]) == (facts.cpus_online, ".")


def test_versions_are_of_known_libraries(host):
    assert {"numpy"} <= set(host.library_versions()) <= set(LIBRARIES)
