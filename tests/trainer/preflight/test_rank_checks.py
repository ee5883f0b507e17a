"""Comparison of ranks with each other and with the machine of the profile."""

import platform
import re
from dataclasses import replace

import pytest

from testbed.examples.checkpoints import resolved_of
from tests.trainer.tiny_models import config_of
from trainer.formats.errors import BadConfig, ProfileMismatch
from trainer.preflight import rank_checks
from trainer.preflight.rank_checks import (
    RankFacts,
    check_ranks,
    compare_profile,
    compare_ranks,
    facts_of_rank,
    gather_facts,
)
from trainer.runtime.ranks import join_ranks

CONFIG = config_of()
SINGLE_RANK = join_ranks(CONFIG, environment={})
GIB = 2**30
TUNED_MEMORY = {"gpu_total_bytes": 80 * GIB}
"""Fingerprint of a machine of which only the GPU's memory is known."""
TUNED = {
    "device": "cuda",
    "gpu_name": "NVIDIA A100",
    "torch": "2.10.0+cpu",
    "allotted_cpus": 8,
}
"""Fingerprint of the machine that the profile was tuned on."""
FACTS = RankFacts(
    host="h",
    configuration="a",
    code="b",
    dataset="c",
    torch="2.10.0+cu128",
    transformers="5.0",
    python="3.12",
    device="NVIDIA A100",
    device_memory_bytes=80 * GIB,
    allotted_cpus=8,
)
"""Facts of a rank on a machine like the one of ``TUNED``."""


@pytest.mark.parametrize(
    "name", ["configuration", "code", "dataset", "torch", "transformers", "python"]
)
def test_rejects_ranks_that_differ(name):
    other = replace(FACTS, **{name: "z" * 64})
    with pytest.raises(BadConfig) as raised:
        compare_ranks([FACTS, other, FACTS])
    usual_value = getattr(FACTS, name)
    shown_part = "z" * 24  # messages show the begin of a hash
    assert (
        raised.value.message
        == f"ranks differ in their {name}: {usual_value} on ranks 0, 2; {shown_part} on"
        " rank 1"
    )
    assert raised.value.next_step


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "NVIDIA A40"),
        ("device_memory_bytes", 40 * GIB),
        ("allotted_cpus", 1),
    ],
)
def test_warns_of_rank_that_may_be_slower(name, value):
    (warning,) = compare_ranks([FACTS] * 6 + [replace(FACTS, **{name: value})])
    usual_value = getattr(FACTS, name)
    assert (
        f"{usual_value} on ranks 0, 1, 2, 3 and 2 more; {value} on rank 6; every step"
        in warning.message
    )


def test_rejects_gpu_with_less_memory():
    smaller = replace(FACTS, device_memory_bytes=40 * GIB)
    with pytest.raises(
        ProfileMismatch, match="of 80 GiB; this one has only 40 GiB"
    ) as raised:
        compare_profile(TUNED_MEMORY, smaller)
    assert raised.value.exit_code == 6
    assert "autotune tune" in raised.value.next_step


@pytest.mark.parametrize(
    "memory_bytes",
    [
        pytest.param(80 * GIB, id="same"),
        # torch reports up to 3 % less than NVML, whose total the profile has.
        pytest.param(round(78.1 * GIB), id="same, as torch reports it"),
        pytest.param(141 * GIB, id="more"),
        pytest.param(None, id="unknown"),
    ],
)
def test_accepts_gpu_with_enough_memory(memory_bytes):
    facts = replace(FACTS, device_memory_bytes=memory_bytes)
    assert compare_profile(TUNED_MEMORY, facts) == []


@pytest.mark.parametrize(
    "fingerprint",
    [
        pytest.param({}, id="no fingerprint"),
        pytest.param(TUNED, id="same machine"),
        pytest.param(
            {
                "gpu_total_bytes": "80",
                "gpu_name": 5,
                "torch": None,
                "allotted_cpus": "8",
            },
            id="values of other types",
        ),
    ],
)
def test_accepts_the_machine_of_the_profile(fingerprint):
    assert compare_profile(fingerprint, FACTS) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"gpu_name": "NVIDIA H100"},
            "gpu name NVIDIA H100; this rank has NVIDIA A100",
            id="GPU",
        ),
        pytest.param(
            {"torch": "2.9.1"}, "torch 2.9.1; this rank has 2.10.0", id="torch"
        ),
        pytest.param(
            {"allotted_cpus": 16},
            "16 available CPU cores; this rank has 8",
            id="CPUs",
        ),
        pytest.param(
            {"device": "cpu"},
            "tuned for a CPU, but this rank has a GPU",
            id="device",
        ),
    ],
)
def test_warns_of_another_machine(changes, message):
    (warning,) = compare_profile(TUNED | changes, FACTS)
    assert message in warning.message
    assert warning.next_step


def test_warns_once_of_all_ranks():
    (warning,) = check_ranks([FACTS] * 3, TUNED | {"torch": "2.9.1"})
    assert "torch 2.9.1" in warning.message


def test_single_rank_passes_without_warnings():
    resolved = resolved_of(CONFIG)
    facts_by_rank = gather_facts(resolved, "d" * 64, SINGLE_RANK)
    assert check_ranks(facts_by_rank, resolved.fingerprint) == []
    assert [facts.host for facts in facts_by_rank] == [platform.node()]


def test_facts_count_cpus_before_binding(monkeypatch):
    # No limit but the affinity before this process was bound.
    monkeypatch.setattr(rank_checks, "allotted_cpus", lambda unbound_cpus: unbound_cpus)
    bound_rank = replace(SINGLE_RANK, cpus_before_binding=128)
    facts = facts_of_rank(resolved_of(CONFIG), dataset_hash="d", ranks=bound_rank)
    assert facts.allotted_cpus == 128


def test_facts_of_a_cpu_have_no_gpu_memory():
    facts = facts_of_rank(resolved_of(CONFIG), dataset_hash="d", ranks=SINGLE_RANK)
    assert (facts.device, facts.device_memory_bytes) == ("cpu", None)


def test_facts_have_the_sha256_of_the_code():
    facts = facts_of_rank(resolved_of(CONFIG), dataset_hash="d", ranks=SINGLE_RANK)
    assert re.fullmatch("[0-9a-f]{64}", facts.code)
