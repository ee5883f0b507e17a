from pathlib import Path

import pytest

from autotune.core.evidence import GpuUse, JointChoice, WorkersEvidence
from autotune.show.workers import chosen_loader, gpu_rows, workers_cells, workers_lines, workers_text
from tests.autotune.profiles import example_profile

JOINT = JointChoice(
    trials=12, loader_workers=5, prefetch_batches=8, pin_memory=False, ratio_to_workers_alone=1.2, ratio_low=1.1,
    ratio_high=1.3, adopted=True,
)  # fmt: skip


def evidence(**changes) -> WorkersEvidence:
    found = example_profile().evidence.workers
    assert found is not None
    return found.model_copy(update=changes)


def with_gpu(**use) -> WorkersEvidence:
    found = evidence()
    return evidence(rows=[row.model_copy(update={"gpu": GpuUse(**use)}) for row in found.rows])


def text_of(found: WorkersEvidence) -> str:
    return workers_text(found, Path("p.toml"), Path("data"))


def test_the_answer_its_refusal_and_what_to_run_next_come_last():
    assert text_of(evidence(local_ranks=4)).splitlines()[-4:] == [
        "loader workers: 1 (so)",
        "0 is slow",
        "profile: p.toml",
        "next: torchrun --nproc-per-node 4 -m trainer --profile p.toml --data data",
    ]
    assert "0 is slow" not in text_of(evidence(refusal=None))


def test_a_row_shows_the_median_the_interval_and_the_verdict():
    slow, fast = evidence().rows
    assert workers_cells(slow) == ["0", "100", "0.500", "0.495 to 0.505", "50.0 %", "n/a", "512 MiB", "too few"]
    assert workers_cells(fast)[-1] == "enough"
    assert workers_cells(fast.model_copy(update={"ratio_low": None, "verdict": "open"}))[3::4] == [
        "not enough windows",
        "undecided",
    ]


def test_missing_figures_show_as_not_available_and_never_as_zero():
    lines = text_of(evidence()).splitlines()
    assert "n/a" in next(line for line in lines if line.lstrip().startswith("0 "))
    assert gpu_rows(evidence()) == []
    assert "occupancy" not in text_of(evidence())


def test_counters_get_a_table_of_their_own():
    found = with_gpu(utilisation_share=0.97, gpm_sm_share=0.8, gpm_pcie_rx_bytes_per_s=2.0**20, power_w=412.4)
    assert gpu_rows(found)[0] == ["0", "80.0 %", "n/a", "n/a", "n/a", "1 MiB/s", "412 W", None, "n/a"]
    assert "occupancy" in text_of(found)
    assert "97.0 %" in text_of(found)


def test_a_network_file_system_is_named_with_the_most_that_staging_could_win():
    (line,) = [
        line for line in workers_lines(evidence(data_filesystem="lustre", data_on_network=True)) if "network" in line
    ]
    assert "(lustre)" in line
    assert "could win 1.0% at most" in line
    assert "autotune data stage" in line


@pytest.mark.parametrize(
    ("joint", "answer", "words"),
    [
        (JOINT, "5, prefetch 8, not pinned", "120.0% (110.0% to 130.0%, 98 %) of workers alone, adopted"),
        (JOINT.model_copy(update={"adopted": False}), "1", "not proven to be faster"),
    ],
)
def test_settings_found_together_are_the_answer_only_where_they_were_adopted(joint, answer, words):
    found = evidence(joint=joint)
    assert chosen_loader(found) == answer
    assert f"loader workers: {answer} (" in text_of(found)
    assert words in text_of(found)


def test_ranks_consumer_and_limit_are_told():
    text = text_of(evidence(local_ranks=2, consumer="a replayed step of 60 ms", operating_state="400 W"))
    assert "consumer: a replayed step of 60 ms; 2 ranks together, 7 windows of at least 2 s" in text
    assert "tried up to 2 workers: 2 allotted CPUs, 1 local rank" in text
    assert "GPU's operating state: 400 W" in text
