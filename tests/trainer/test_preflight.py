import errno
import platform
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from testbed.datasets import write_dataset
from testbed.examples.checkpoints import resolved_of
from tests.trainer.oracles import config_of
from trainer import preflight
from trainer.data.loader import check_no_shared_samples
from trainer.data.manifest import read_manifest
from trainer.distributed.ranks import join_ranks
from trainer.errors import BadConfig, ProfileMismatch
from trainer.record.writer import RunWriter

CONFIG = config_of()
RANKS = join_ranks(CONFIG, environment={})
MIB = 2**20
GIB = 2**30
TOKEN_OF_RANK_0 = "0a0b"
"""Part of the name of the file by which rank 0 tests its directory."""
MEMORY = {"gpu_total_bytes": 80 * GIB}
"""Fingerprint of a machine of which only the GPU's memory is known."""
TUNED = {
    "device": "cuda",
    "gpu_name": "NVIDIA A100",
    "torch": "2.10.0+cpu",
    "allotted_cpus": 8,
}
"""Fingerprint of the machine that the profile was tuned on."""
GPU = {
    "device": "NVIDIA A100",
    "device_memory_bytes": str(80 * GIB),
    "torch": "2.10.0+cu128",
    "allotted_cpus": "8",
}
FACTS = GPU | {
    "configuration": "a",
    "code": "b",
    "dataset": "c",
    "transformers": "5.0",
    "python": "3.12",
}


@pytest.mark.parametrize(
    "name", ["configuration", "code", "dataset", "torch", "transformers", "python"]
)
def test_rejects_ranks_that_differ(name):
    with pytest.raises(BadConfig) as raised:
        preflight.compare_ranks([FACTS, FACTS | {name: "z" * 64}, FACTS])
    assert (
        raised.value.message
        == f"ranks differ in their {name}: {FACTS[name]} on ranks 0, 2; {'z' * 24} on"
        " rank 1"
    )
    assert raised.value.next_step


@pytest.mark.parametrize("name", ["device", "device_memory_bytes", "allotted_cpus"])
def test_warns_of_ranks_that_are_slower(name):
    (warning,) = preflight.compare_ranks([FACTS] * 6 + [FACTS | {name: "1"}])
    assert (
        f"{FACTS[name][:24]} on ranks 0, 1, 2, 3 and 2 more; 1 on rank 6; every step"
        in warning.message
    )


LONG_SAMPLES = [[7] * 100] * 3


@pytest.mark.parametrize(
    ("settings", "samples", "messages"),
    [
        pytest.param({}, [[7] * 20] * 9, [], id="nothing cut"),
        pytest.param({}, LONG_SAMPLES, ["38.0% of the tokens"], id="cut"),
        pytest.param({"seq_length_tokens": 128}, LONG_SAMPLES, [], id="long enough"),
        pytest.param(
            {"evaluation": {"interval_steps": 5}},
            [[7] * 20] * 9,
            ["interval_steps = 5 has no effect"],
            id="no validation",
        ),
    ],
)
def test_warns_of_data_that_is_not_used(tmp_path, settings, samples, messages):
    directory = write_dataset(tmp_path / "data", samples)
    config = config_of(**({"seq_length_tokens": 64} | settings))
    warnings = preflight.check_data(config, read_manifest(directory), directory)
    assert len(warnings) == len(messages)
    for warning, message in zip(warnings, messages, strict=True):
        assert message in warning.message
        assert str(directory) in warning.message
        assert warning.level == "warning"
        assert "Prepare" in warning.next_step or "prepare" in warning.next_step


def test_accepts_ranks_without_shared_samples():
    check_no_shared_samples([])
    check_no_shared_samples(
        [np.array([1, 2]), np.array([], dtype=np.int64), np.array([3, 4])]
    )


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([[9], [1, 2, 3], [3, 4, 2]], "ranks 1 and 2 received 2 samples in common"),
        ([[9], [1, 1]], "a rank received a sample twice"),
    ],
    ids=["two ranks", "one rank"],
)
def test_rejects_shared_samples(samples, message):
    with pytest.raises(BadConfig, match=message):
        check_no_shared_samples([np.array(numbers) for numbers in samples])


def test_rejects_gpu_with_less_memory():
    smaller = GPU | {"device_memory_bytes": str(40 * GIB)}
    with pytest.raises(
        ProfileMismatch, match="of 80 GiB; this one has only 40 GiB"
    ) as raised:
        preflight.compare_profile(MEMORY, smaller)
    assert raised.value.exit_code == 6
    assert "autotune tune" in raised.value.next_step


@pytest.mark.parametrize(
    ("fingerprint", "facts"),
    [
        pytest.param(MEMORY, {"device_memory_bytes": str(80 * GIB)}, id="memory"),
        pytest.param(
            MEMORY,
            {"device_memory_bytes": str(round(78.1 * GIB))},
            id="memory as torch reports it",
        ),
        pytest.param(MEMORY, {"device_memory_bytes": str(141 * GIB)}, id="more memory"),
        pytest.param(MEMORY, {"device_memory_bytes": "None"}, id="unknown memory"),
        pytest.param({}, {}, id="no fingerprint"),
        pytest.param(TUNED, {}, id="same machine"),
        pytest.param(
            {
                "gpu_total_bytes": "80",
                "gpu_name": 5,
                "torch": None,
                "allotted_cpus": "8",
            },
            {},
            id="values of other types",
        ),
    ],
)
def test_accepts_the_machine_of_the_profile(fingerprint, facts):
    assert preflight.compare_profile(fingerprint, GPU | facts) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gpu_name": "NVIDIA H100"},
            "gpu name NVIDIA H100; this rank has NVIDIA A100",
        ),
        ({"torch": "2.9.1"}, "torch 2.9.1; this rank has 2.10.0"),
        ({"allotted_cpus": 16}, "16 available CPU cores; this rank has 8"),
        ({"device": "cpu"}, "tuned for a CPU, but this rank has a GPU"),
    ],
    ids=["GPU", "torch", "CPUs", "device"],
)
def test_warns_of_another_machine(changes, message):
    (warning,) = preflight.compare_profile(TUNED | changes, GPU)
    assert message in warning.message
    assert warning.next_step


@pytest.fixture
def machine_cpus(monkeypatch) -> int:
    """Number of CPUs to which nothing but a stricter limit restricts the process."""
    cpus = 64
    monkeypatch.setattr(
        "trainer.preflight.os.sched_getaffinity", lambda _: set(range(cpus))
    )
    return cpus


def write_cpu_quota_v2(root: Path, content: str) -> None:
    """Write a quota of this process's unified control group, version 2."""
    match = re.search(
        r"^0::/?(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE
    )
    if match is None:
        pytest.skip("no unified control groups on this machine")
    group = root / match[1]
    group.mkdir(parents=True, exist_ok=True)
    (group / "cpu.max").write_text(content)


def write_cpu_quota_v1(root: Path, quota_us: str) -> None:
    """Write a quota of a version 1 control group, per 100 ms."""
    group = root / "cpu"
    group.mkdir()
    (group / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")


@pytest.mark.parametrize(
    ("quota_us_and_period_us", "expected"),
    [
        pytest.param("800000 100000", 8, id="eight CPUs"),
        pytest.param("50000 100000", 1, id="half a CPU"),
    ],
)
def test_control_group_v2_limits_cpus(
    tmp_path, machine_cpus, quota_us_and_period_us, expected
):
    write_cpu_quota_v2(tmp_path, quota_us_and_period_us)
    assert preflight.allotted_cpus(None, {}, tmp_path) == expected


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("max 100000", id="unlimited"),
        pytest.param("x", id="no quota"),
        pytest.param("", id="empty file"),
    ],
)
def test_control_group_v2_without_quota_limits_nothing(tmp_path, machine_cpus, content):
    write_cpu_quota_v2(tmp_path, content)
    assert preflight.allotted_cpus(None, {}, tmp_path) == machine_cpus


@pytest.mark.parametrize(
    ("quota_us", "expected"),
    [
        pytest.param("400000", 4, id="four CPUs"),
        pytest.param("1000", 1, id="a hundredth of a CPU"),
    ],
)
def test_control_group_v1_limits_cpus(tmp_path, machine_cpus, quota_us, expected):
    write_cpu_quota_v1(tmp_path, quota_us)
    assert preflight.allotted_cpus(None, {}, tmp_path) == expected


@pytest.mark.parametrize(
    "quota_us",
    [pytest.param("-1", id="unlimited"), pytest.param("", id="empty file")],
)
def test_control_group_v1_without_quota_limits_nothing(
    tmp_path, machine_cpus, quota_us
):
    write_cpu_quota_v1(tmp_path, quota_us)
    assert preflight.allotted_cpus(None, {}, tmp_path) == machine_cpus


def test_slurm_limits_cpus(tmp_path, machine_cpus):
    environment = {"SLURM_CPUS_PER_TASK": "12"}
    assert preflight.allotted_cpus(None, environment, tmp_path) == 12


@pytest.mark.parametrize("slurm_cpus", ["many", ""])
def test_ignores_slurm_cpus_that_are_no_number(tmp_path, machine_cpus, slurm_cpus):
    environment = {"SLURM_CPUS_PER_TASK": slurm_cpus}
    assert preflight.allotted_cpus(None, environment, tmp_path) == machine_cpus


def test_cpus_before_binding_replace_those_of_the_process(tmp_path, machine_cpus):
    unbound_cpus = 2 * machine_cpus
    assert preflight.allotted_cpus(unbound_cpus, {}, tmp_path) == unbound_cpus


@pytest.mark.parametrize(
    ("unbound_cpus", "expected"),
    [pytest.param(2, 2, id="binding"), pytest.param(128, 12, id="SLURM")],
)
def test_allotted_cpus_are_the_least_limit(
    tmp_path, machine_cpus, unbound_cpus, expected
):
    environment = {"SLURM_CPUS_PER_TASK": "12"}
    assert preflight.allotted_cpus(unbound_cpus, environment, tmp_path) == expected


def test_single_rank_passes_without_warnings():
    warnings, hosts = preflight.check_ranks(resolved_of(CONFIG), "ä" * 64, RANKS)
    assert warnings == []
    assert hosts == (platform.node(),)


def test_facts_count_cpus_before_binding(monkeypatch):
    monkeypatch.setattr("trainer.preflight.allotted_cpus", lambda unbound: unbound)
    bound = replace(RANKS, cpus_before_binding=128)
    facts = preflight.facts_of_rank(resolved_of(CONFIG), dataset_hash="d", ranks=bound)
    assert facts["allotted_cpus"] == "128"
    assert facts["device_memory_bytes"] == "None"
    assert len(facts["code"]) == 64


@pytest.fixture
def free_150_mib(monkeypatch):
    monkeypatch.setattr(
        "trainer.preflight.shutil.disk_usage", lambda _: SimpleNamespace(free=150 * MIB)
    )


@pytest.mark.usefixtures("free_150_mib")
@pytest.mark.parametrize(
    ("checkpoint_mib", "existing", "keep_last"), [(75, 0, 1), (150, 1, 1), (50, 0, 2)]
)
def test_accepts_enough_room(tmp_path, checkpoint_mib, existing, keep_last):
    warnings = preflight.check_room(
        tmp_path, checkpoint_mib * MIB, RANKS, existing=existing, keep_last=keep_last
    )
    assert warnings == []


@pytest.mark.usefixtures("free_150_mib")
def test_new_run_requires_room_for_two_checkpoints(tmp_path):
    with pytest.raises(
        BadConfig, match="has 150 MiB free; 2 checkpoints require 152 MiB"
    ) as raised:
        preflight.check_room(tmp_path, 76 * MIB, RANKS, existing=0)
    assert "train.checkpoint.enabled=false" in raised.value.next_step


@pytest.mark.usefixtures("free_150_mib")
@pytest.mark.parametrize("existing", [1, 2, 5])
def test_resumed_run_without_room_is_warned(tmp_path, existing):
    (warning,) = preflight.check_room(tmp_path, 151 * MIB, RANKS, existing=existing)
    assert "the next save will fail" in warning.next_step


@pytest.mark.usefixtures("free_150_mib")
def test_warns_if_not_all_checkpoints_fit(tmp_path):
    (warning,) = preflight.check_room(
        tmp_path, 51 * MIB, RANKS, existing=0, keep_last=2
    )
    assert (
        "has 150 MiB free; keeping 2 checkpoints while writing the next requires"
        " 153 MiB" in warning.message
    )
    assert "keep_last" in warning.next_step


class SeveralRanks:
    """Several ranks, of which this process is the first (0) or the last.

    Args:
        leads: True if this process is rank 0.
        misses: 1.0 for each other rank that does not see the file of rank 0, else 0.0.
    """

    def __init__(self, *misses: float, leads: bool = True) -> None:
        self.leads = leads
        self._misses = misses

    def broadcast_object(self, token):
        return token if self.leads else TOKEN_OF_RANK_0

    def all_reduce_sum(self, *values):
        return list(values)

    def all_gather_float(self, value):
        if self.leads:
            return [value, *self._misses]
        return [*self._misses, value]


RANKS_THAT_MISS_THE_DIRECTORY = pytest.mark.parametrize(
    ("ranks", "named"),
    [
        pytest.param(SeveralRanks(1.0), "rank 1", id="the other rank"),
        pytest.param(SeveralRanks(0.0, 1.0, 1.0), "ranks 2, 3", id="two of four"),
        pytest.param(SeveralRanks(0.0, leads=False), "rank 1", id="this rank"),
        pytest.param(
            SeveralRanks(*[1.0] * 6), "ranks 1, 2, 3, 4 and 2 more", id="many ranks"
        ),
    ],
)


@RANKS_THAT_MISS_THE_DIRECTORY
def test_rejects_directory_that_ranks_must_see(tmp_path, ranks, named):
    with pytest.raises(
        BadConfig, match=f"not found on {named}, but all ranks write"
    ) as raised:
        preflight.check_shared(tmp_path, ranks, needed=True)
    assert "--out" in raised.value.next_step
    assert list(tmp_path.iterdir()) == []


@RANKS_THAT_MISS_THE_DIRECTORY
def test_warns_of_directory_that_ranks_miss(tmp_path, ranks, named):
    (warning,) = preflight.check_shared(tmp_path, ranks, needed=False)
    assert (
        f"not found on {named}: they cannot record their exit in exit.json"
        in warning.message
    )
    assert "--out" in warning.next_step
    assert list(tmp_path.iterdir()) == []


def test_error_names_the_next_step_of_the_warning(tmp_path):
    ranks = SeveralRanks(1.0)
    (warning,) = preflight.check_shared(tmp_path, ranks, needed=False)
    with pytest.raises(BadConfig) as raised:
        preflight.check_shared(tmp_path, ranks, needed=True)
    assert raised.value.next_step == warning.next_step


@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize(
    "ranks", [RANKS, SeveralRanks(0.0, 0.0)], ids=["one rank", "several ranks"]
)
def test_accepts_shared_directory(tmp_path, ranks, needed):
    assert preflight.check_shared(tmp_path, ranks, needed=needed) == []
    assert list(tmp_path.iterdir()) == []


def test_other_rank_sees_the_file_of_rank_0(tmp_path):
    (tmp_path / f".seen-by-all-ranks.{TOKEN_OF_RANK_0}").touch()
    ranks = SeveralRanks(0.0, leads=False)
    assert preflight.check_shared(tmp_path, ranks, needed=True) == []


def test_warns_of_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr("trainer.files.fcntl.flock", no_locks)
        writer = RunWriter(tmp_path / "r", active=True)
    (warning,) = preflight.check_directory(writer, CONFIG, 1, 0, RANKS)
    assert "has no locks" in warning.message


def test_file_system_with_locks_has_no_warning(tmp_path):
    writer = RunWriter(tmp_path / "r", active=True)
    assert preflight.check_directory(writer, CONFIG, 1, 0, RANKS) == []
