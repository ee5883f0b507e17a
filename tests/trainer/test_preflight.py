import errno
import platform
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from testbed.examples.checkpoints import resolved_of
from tests.trainer.oracles import config_of
from trainer import preflight
from trainer.data.loader import check_no_shared_samples
from trainer.distributed.ranks import join_ranks
from trainer.errors import BadConfig, ProfileMismatch
from trainer.record.writer import RunWriter

CONFIG = config_of()
RANKS = join_ranks(CONFIG, environment={})
MIB = 2**20
GPU = {
    "device": "NVIDIA A100",
    "device_memory_bytes": str(80 * 2**30),
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
def test_what_would_make_training_silently_wrong_is_refused_and_what_makes_it_slow_said_with_the_ranks(
    name,
):
    with pytest.raises(BadConfig) as caught:
        preflight.compare_ranks([FACTS, FACTS | {name: "z" * 64}, FACTS])
    assert (
        caught.value.message
        == f"ranks differ in their {name}: {FACTS[name]} on ranks 0, 2; {'z' * 24} on"
        " rank 1"
    )
    assert caught.value.next_step
    for slow in ("device", "device_memory_bytes", "allotted_cpus"):
        (remark,) = preflight.compare_ranks([FACTS] * 6 + [FACTS | {slow: "1"}])
        assert (
            f"{FACTS[slow][:24]} on ranks 0, 1, 2, 3 and 2 more; 1 on rank 6; every"
            " step" in remark.message
        )


def test_samples_that_two_ranks_got_are_refused_with_both_named():
    check_no_shared_samples([])
    check_no_shared_samples(
        [np.array([1, 2]), np.array([], dtype=np.int64), np.array([3, 4])]
    )
    with pytest.raises(BadConfig, match="ranks 1 and 2 received 2 samples in common"):
        check_no_shared_samples(
            [np.array([9]), np.array([1, 2, 3]), np.array([3, 4, 2])]
        )
    with pytest.raises(BadConfig, match="a rank received a sample twice"):
        check_no_shared_samples([np.array([9]), np.array([1, 1])])


MEMORY = {"gpu_total_bytes": 80 * 2**30}
TUNED = {
    "device": "cuda",
    "gpu_name": "NVIDIA A100",
    "torch": "2.10.0+cpu",
    "allotted_cpus": 8,
}


def test_a_gpu_with_less_memory_than_the_profile_was_tuned_on_is_refused():
    with pytest.raises(
        ProfileMismatch, match="of 80 GiB; this one has only 40 GiB"
    ) as caught:
        preflight.compare_profile(
            MEMORY, GPU | {"device_memory_bytes": str(40 * 2**30)}
        )
    assert caught.value.exit_code == 6
    assert "autotune tune" in caught.value.next_step


@pytest.mark.parametrize(
    ("fingerprint", "here", "told"),
    [
        *(
            (MEMORY, {"device_memory_bytes": str(size)}, "")
            for size in (80 * 2**30, round(78.1 * 2**30), 141 * 2**30)
        ),
        ({}, {}, ""),
        (TUNED, {}, ""),
        # Strange values are not believed.
        (
            {
                "gpu_total_bytes": "80",
                "gpu_name": 5,
                "torch": None,
                "allotted_cpus": "8",
            },
            {},
            "",
        ),
        (MEMORY, {"device_memory_bytes": "None"}, ""),
        (
            TUNED | {"gpu_name": "NVIDIA H100"},
            {},
            "gpu name NVIDIA H100; this rank has NVIDIA A100",
        ),
        (TUNED | {"torch": "2.9.1"}, {}, "torch 2.9.1; this rank has 2.10.0"),
        (TUNED | {"allotted_cpus": 16}, {}, "16 available CPU cores; this rank has 8"),
        (TUNED | {"device": "cpu"}, {}, "tuned for a CPU, but this rank has a GPU"),
    ],
)
def test_another_machine_than_the_profile_was_tuned_on_is_said_and_one_like_it_passes(
    fingerprint, here, told
):
    remarks = preflight.compare_profile(fingerprint, GPU | here)
    assert len(remarks) == bool(told)
    assert all(told in remark.message and remark.next_step for remark in remarks)


@pytest.mark.parametrize(
    ("quota", "older_quota_us", "unbound", "slurm", "expected"),
    [
        ("max 100000", "", None, "", 64),
        ("800000 100000", "", None, "", 8),
        ("50000 100000", "", None, "", 1),
        ("x", "", None, "", 64),
        ("", "-1", None, "", 64),
        ("", "400000", None, "", 4),
        ("", "1000", None, "", 1),
        ("", "", None, "", 64),
        ("", "", None, "12", 12),
        ("", "", None, "many", 64),
        ("", "", 2, "12", 2),
        ("", "", 128, "", 128),
        ("", "", 128, "12", 12),
    ],
)
def test_the_least_of_affinity_before_binding_quota_of_a_control_group_and_slurms_word_counts(
    monkeypatch, tmp_path, quota, older_quota_us, unbound, slurm, expected
):
    monkeypatch.setattr(
        "trainer.preflight.os.sched_getaffinity", lambda _: set(range(64))
    )
    group = re.search(
        r"^0::/?(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE
    )
    if quota and group is None:
        pytest.skip("no unified control groups here")
    own = tmp_path / (group[1] if group else "")
    for place, content in (
        (own / "cpu.max", quota),
        (tmp_path / "cpu" / "cpu.cfs_quota_us", f"{older_quota_us}\n"),
        (tmp_path / "cpu" / "cpu.cfs_period_us", "100000\n"),
    ):
        place.parent.mkdir(exist_ok=True, parents=True)
        place.write_text(content)
    assert (
        preflight.allotted_cpus(unbound, {"SLURM_CPUS_PER_TASK": slurm}, tmp_path)
        == expected
    )


def test_facts_survive_their_way_between_ranks_and_count_the_processors_of_before_binding(
    monkeypatch,
):
    assert preflight.check_ranks(resolved_of(CONFIG), "ä" * 64, RANKS) == (
        [],
        (platform.node(),),
    )
    monkeypatch.setattr("trainer.preflight.allotted_cpus", lambda unbound: unbound)
    bound = replace(RANKS, cpus_before_binding=128)
    facts = preflight.facts_of_rank(resolved_of(CONFIG), dataset_hash="d", ranks=bound)
    assert (
        facts["allotted_cpus"],
        facts["device_memory_bytes"],
        len(facts["code"]),
    ) == ("128", "None", 64)


def test_room_for_two_checkpoints_is_asked_for_before_the_first_step_and_said_of_those_to_keep(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "trainer.preflight.shutil.disk_usage", lambda _: SimpleNamespace(free=150 * MIB)
    )
    assert (
        preflight.check_room(tmp_path, 75 * MIB, RANKS, existing=0, keep_last=1) == []
    )
    with pytest.raises(
        BadConfig, match="has 150 MiB free; 2 checkpoints require 152 MiB"
    ) as caught:
        preflight.check_room(tmp_path, 76 * MIB, RANKS, existing=0)
    assert "train.checkpoint.enabled=false" in caught.value.next_step
    assert (
        preflight.check_room(tmp_path, 150 * MIB, RANKS, existing=1, keep_last=1) == []
    )
    for there in (1, 2, 5):  # a run that can go on does so, with a word
        (remark,) = preflight.check_room(tmp_path, 151 * MIB, RANKS, existing=there)
        assert "the next save will fail" in remark.next_step
    assert (
        preflight.check_room(tmp_path, 50 * MIB, RANKS, existing=0, keep_last=2) == []
    )
    (remark,) = preflight.check_room(tmp_path, 51 * MIB, RANKS, existing=0, keep_last=2)
    assert (
        "has 150 MiB free; keeping 2 checkpoints while writing the next requires"
        " 153 MiB" in remark.message
    )
    assert "keep_last" in remark.next_step


def _some_elsewhere(misses, leads=True):
    """The first of some, of which those after it may not see its files; or one that is
    not the first."""
    return SimpleNamespace(
        leads=leads,
        broadcast_object=lambda text: text if leads else "0a0b",
        all_reduce_sum=lambda *values: list(values),
        all_gather_float=lambda value: [value, *misses] if leads else [*misses, value],
    )


@pytest.mark.parametrize(
    ("misses", "leads", "shown"),
    [
        ((1.0,), True, "rank 1"),
        ((0.0, 1.0, 1.0), True, "ranks 2, 3"),
        ((0.0,), False, "rank 1"),
        ((1.0,) * 6, True, "ranks 1, 2, 3, 4 and 2 more"),
    ],
)
def test_a_directory_that_some_ranks_do_not_see_is_refused_if_they_write_there_and_else_said(
    tmp_path, misses, leads, shown
):
    ranks = _some_elsewhere(misses, leads)
    with pytest.raises(
        BadConfig, match=f"not found on {shown}, but all ranks write"
    ) as caught:
        preflight.check_shared(tmp_path, ranks, needed=True)
    (remark,) = preflight.check_shared(tmp_path, ranks, needed=False)
    assert (
        f"not found on {shown}: they cannot record their exit in exit.json"
        in remark.message
    )
    assert remark.next_step == caught.value.next_step
    assert "--out" in remark.next_step
    assert list(tmp_path.iterdir()) == []
    for seen in (RANKS, _some_elsewhere((0.0, 0.0))):
        assert [
            preflight.check_shared(tmp_path, seen, needed=needed)
            for needed in (True, False)
        ] == [[], []]
    assert list(tmp_path.iterdir()) == []
    if not leads:  # and it sees the first one's file
        (tmp_path / ".seen-by-all-ranks.0a0b").touch()
        assert preflight.check_shared(tmp_path, ranks, needed=True) == []


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr("trainer.files.fcntl.flock", none)
        writer = RunWriter(tmp_path / "r", active=True)
    (remark,) = preflight.check_directory(writer, CONFIG, 1, 0, RANKS)
    assert "has no locks" in remark.message
    assert (
        preflight.check_directory(
            RunWriter(tmp_path / "r", active=True), CONFIG, 1, 0, RANKS
        )
        == []
    )
