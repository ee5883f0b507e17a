"""Sections of each capability, which commands and reports share."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.document import Chart, Missing, Section, Table
from autotune.base.interval import NOT_ENOUGH
from autotune.base.render_console import console_text
from autotune.baseline.sections import baseline_section, baseline_text
from autotune.corpus.sections import BAR_WIDTH, length_histogram
from autotune.corpus.values import HISTOGRAM_EDGES
from autotune.evidence.baseline import BaselineEvidence, BaselineRow, SettingDifference
from autotune.evidence.gpu_use import GpuUse
from autotune.evidence.network import Link, ScalingRow
from autotune.evidence.workers import JointChoice
from autotune.memory.sections import batch_split_words, curve_section, probe_text
from autotune.network.sections import network_text, scaling_lines
from autotune.profiles.approval_record import Approval
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    split_global_batch,
)
from autotune.profiles.exploration_text import exploration_text
from autotune.profiles.sections import profile_text, written_answer
from autotune.profiles.store import WrittenProfile
from autotune.search.sections import exploration_section
from autotune.subjects.mlm.network.evidence import evidence as network_evidence
from autotune.workers.sections import (
    chosen_loader,
    workers_lines,
    workers_section,
    workers_text,
)
from testbed.examples.profiles import but, example_profile
from testbed.examples.tuning import example_profile as full_profile
from tests.autotune.report.examples import of_kind, reported
from tests.autotune.subjects.mlm.network.gradient_syncs import LINK, Cluster, tuning_on


def probed(profile, previous=None):
    return WrittenProfile(
        path=Path("p.toml"), profile=profile, trials=(), previous=previous
    )


def test_console_indents_sections():
    inner = Missing(subject="A\x1b[2J", commands=("first", "second\n"))
    table = Table(caption="T", headers=("a",), rows=((None,),))
    text = console_text(
        (
            Section(title="S", key="s", blocks=(inner, table)),
            Missing(subject="B", commands=()),
        )
    )
    assert text.splitlines() == [
        "S",
        "  A\\x1b[2J: not measured (run: first, then second)",
        "",
        "  T",
        "  a",
        "  n/a",
        "",
        "B: not measured",
    ]


@pytest.mark.parametrize(
    ("driver", "known"), [(None, "measured"), ("0.0 (nullgpu)", "allocator")]
)
def test_peaks_of_simulated_gpu_are_the_allocators(driver, known):
    profile = but(example_profile(), fingerprint={"driver": driver})
    assert written_answer(probed(profile))["bytes_known"] == known
    assert ("pretended GPU" in probe_text([probed(profile)])) == (known == "allocator")


@pytest.mark.parametrize(
    "tokens", [DEFAULT_GLOBAL_BATCH_TOKENS, DEFAULT_GLOBAL_BATCH_TOKENS + 1]
)
def test_default_global_batch_is_marked(tokens):
    profile = but(example_profile(), constraints={"global_batch_tokens": tokens})
    approval = Approval(state="not reviewed", review=None, present_sha256="a" * 64)
    for text in (
        profile_text(profile, approval, intact=True),
        probe_text([probed(profile)]),
    ):
        assert f"{tokens:,} non-padding tokens" in text
        assert (" (the default)" in text) == (tokens == DEFAULT_GLOBAL_BATCH_TOKENS)


def test_choice_is_shown_in_every_output():
    changes = {
        "choice": "430 fit; your global batch needs 128 per GPU",
        "knee_micro_batch_sizes": [1, 2],
    }
    profile = but(
        example_profile(),
        evidence={"probe": example_profile().evidence.probe.model_copy(update=changes)},
    )
    text = probe_text([probed(profile, previous=Path("old.toml"))])
    for output in (text, console_text(curve_section(reported(profile=profile)))):
        assert "430 fit; your global batch needs 128 per GPU" in output
    assert text.splitlines()[-2:] == [
        "profile: p.toml (previous one: old.toml)",
        "next: autotune workers p.toml",
    ]


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "ranks", "words"),
    [
        (
            32,
            8,
            1,
            "global batch of 32 = 4 x 8 (accumulation x micro-batch)",
        ),
        (
            1,
            8,
            1,
            "global batch of 1 = 1 x 1 (accumulation x micro-batch)",
        ),
        (256, 403, 2, "256 = 1 x 128 x 2 ranks (accumulation x micro-batch)"),
        (
            32,
            15,
            1,
            (
                "32 = 3 x 11 (accumulation x micro-batch); 1 sequence empty, none with"
                " a global batch of 30 or 33"
            ),
        ),
    ],
)
def test_batch_split_is_described(global_batch_size, micro_batch_size, ranks, words):
    split = split_global_batch(global_batch_size, micro_batch_size, ranks)
    assert words in batch_split_words(split, ranks)


JOINT = JointChoice(
    trials=12,
    num_workers=5,
    prefetch_factor=8,
    pin_memory=False,
    ratio_to_workers_alone=1.2,
    ratio_low=1.1,
    ratio_high=1.3,
    adopted=True,
)


def sweep(**changes):
    return example_profile().evidence.workers.model_copy(update=changes)


def section_of(**changes):
    return workers_section(
        reported(profile=but(example_profile(), evidence={"workers": sweep(**changes)}))
    )


def workers_text_of(evidence, **data):
    profile = but(example_profile(), evidence={"workers": evidence})
    return workers_text(probed(profile), **data)


def test_sweep_text_begins_with_its_answer():
    text = workers_text_of(
        sweep(
            local_ranks=4, consumer="a replayed step of 60 ms", operating_state="400 W"
        )
    )
    assert (
        "onsumer: a replayed step of 60 ms; 4 ranks, 7 windows of at least 2 s" in text
    )
    assert "argest num_workers allowed: 2 (2 allotted CPUs, 1 local rank)" in text
    assert "GPU state on cached batches: 400 W" in text
    lines = text.splitlines()
    assert lines[0] == "DataLoader workers: 1 (so). 0 is slow."
    assert lines[-2:] == ["profile: p.toml", "next: autotune train p.toml"]
    with_data = workers_text_of(sweep(), data=Path("other"))
    assert with_data.endswith("next: autotune train p.toml --data other")
    assert "0 is slow" not in workers_text_of(sweep(next_smaller=None))


def tables_of(row):
    return [table.rows for table in of_kind(section_of(rows=[row]), Table)]


def test_workers_row_shows_the_verdict():
    slow, fast = sweep().rows
    open_ = fast.model_copy(update={"ratio_low": None, "verdict": "open"})
    ((none,),), ((enough,),), ((undecided,),) = (
        tables_of(row) for row in (slow, fast, open_)
    )
    assert none == [
        "0",
        "100",
        "50.0 %",
        "49.5 % to 50.5 %",
        "50.0 %",
        "n/a",
        "512 MiB",
        "too few",
    ]
    assert enough[-1] == "sufficient"
    assert undecided[3::4] == [NOT_ENOUGH, "undecided"]


def test_gpu_counters_have_their_own_table():
    use = GpuUse(
        utilisation_share=0.97,
        gpm_sm_share=0.8,
        gpm_pcie_rx_bytes_per_s=2.0**20,
        power_w=412.4,
    )
    slow, _ = sweep().rows
    (row,), (counters,) = tables_of(slow.model_copy(update={"gpu": use}))
    assert row[5] == "97.0 %"
    assert counters == [
        "0",
        "80.0 %",
        "n/a",
        "n/a",
        "n/a",
        "1 MiB/s",
        "412 W",
        None,
        "n/a",
    ]


@pytest.mark.parametrize(
    ("joint", "answer", "words"),
    [
        (
            JOINT,
            "5, prefetch 8, not pinned",
            "1.20x (1.10x to 1.30x, 98 %) the throughput of the best num_workers",
        ),
        (
            JOINT.model_copy(update={"adopted": False}),
            "1",
            "not faster at 98 % confidence",
        ),
    ],
    ids=["adopted", "not adopted"],
)
def test_adopted_joint_settings_are_the_answer(joint, answer, words):
    evidence = sweep(joint=joint)
    assert chosen_loader(evidence) == answer
    assert f"DataLoader workers: {answer} (" in workers_text_of(evidence)
    assert words in workers_text_of(evidence)


def test_network_file_system_suggests_staging():
    (line,) = [
        line
        for line in workers_lines(sweep(data_filesystem="lustre", data_on_network=True))
        if "network" in line
    ]
    for words in ("(lustre)", "gains at most 1.0 %", "autotune data stage"):
        assert words in line


def test_open_sweep_names_the_time_it_needs():
    def commands(**changes):
        return [
            command
            for missing in of_kind(section_of(**changes), Missing)
            for command in missing.commands
        ]

    for seconds, minutes in ((14.0, 10), (600.0, 40)):
        assert commands(undecided_between=[0, 2], seconds=seconds)[-1].endswith(
            f"--time-limit {minutes}min"
        )
    assert commands() == []


PAPER = BaselineRow(
    name="paper",
    subject="mlm: m",
    differences=[SettingDifference(key="mlm_head", theirs="dense", tuned="sparse")],
    units_per_s=[240.0, 250.0, 260.0],
    speedup=4.0,
    speedup_low=2.0,
    speedup_high=5.0,
    data_wait_share=0.01,
    outcome="ran",
)
DEFAULT = BaselineRow(
    name="untuned",
    subject="mlm: m",
    units_per_s=[],
    outcome="out of memory even with one sequence",
)
TUNED = BaselineRow(
    name="tuned",
    subject="mlm: m",
    units_per_s=[1000.0] * 3,
    speedup=1.0,
    data_wait_share=0.0,
    outcome="ran",
)
BASELINE = BaselineEvidence(
    rows=[PAPER, DEFAULT, TUNED],
    unit="tokens",
    local_ranks=2,
    window_s=2.0,
    windows=6,
    seconds=60.0,
)


def test_baseline_text_gives_gain_with_bounds():
    lines = baseline_text(BASELINE, Path("p.toml")).splitlines()
    assert (
        "Tuned vs the paper's trainer: 4.00 (2.00 to 5.00, 95 %) times as fast."
        in lines
    )
    assert (
        "Tuned vs untuned settings: n/a (out of memory even with one sequence)."
        in lines
    )
    assert "the paper's trainer: mlm: m; mlm_head: dense instead of sparse" in lines
    assert "untuned settings: mlm: m" in lines
    assert lines[-2:] == ["profile: p.toml", "next: autotune report p.toml"]
    (failed,) = [line for line in lines if line.startswith("untuned settings  ")]
    assert failed.split() == [
        "untuned",
        "settings",
        *["n/a"] * 5,
        "0",
        "out",
        "of",
        "memory",
        "even",
        "with",
        "one",
        "sequence",
    ]
    (tuned,) = [line for line in lines if line.startswith("tuned  ")]
    assert tuned.split() == [
        "tuned",
        "1,000",
        "1,000",
        "to",
        "1,000",
        "n/a",
        "n/a",
        "0.0",
        "%",
        "3",
        "ran",
    ]
    single = PAPER.model_copy(update={"speedup_low": None, "speedup_high": None})
    lines_without_bounds = baseline_text(
        BASELINE.model_copy(update={"rows": [single, TUNED]}), Path("p.toml")
    ).splitlines()
    assert (
        f"Tuned vs the paper's trainer: 4.00 ({NOT_ENOUGH}) times as fast."
        in lines_without_bounds
    )


@pytest.mark.parametrize(
    "rates",
    [[1000.0, 2800.0, 7700.0], [2800.0, 2810.0], [2800.0]],
    ids=["wide spread", "two windows", "one window"],
)
def test_noisy_windows_get_no_bar(rates):
    def block_of(rates):
        baseline = full_profile("d").evidence.baseline
        rows = [
            (
                row.model_copy(update={"units_per_s": rates})
                if row.name == "tuned"
                else row
            )
            for row in baseline.rows
        ]
        profile = but(
            full_profile("d"),
            evidence={"baseline": baseline.model_copy(update={"rows": rows})},
        )
        return of_kind(baseline_section(reported(profile=profile)), Table | Chart)[0]

    enough = block_of([2700.0, 2800.0, 2900.0])
    block = block_of(rates)
    assert enough.drawing.bars[-1].low > 2000
    table = block if isinstance(block, Table) else block.table
    assert next(row for row in table.rows if row[0] == "tuned")[2] == NOT_ENOUGH
    assert isinstance(block, Table) or "tuned" not in {
        bar.label for bar in block.drawing.bars
    }


def explored(**changes):
    return full_profile("d").evidence.explore.model_copy(update=changes)


def test_exploration_states_every_fact():
    assert exploration_text(explored()).splitlines() == [
        (
            "Configuration of the step: 64 packed sequences, bf16, compiled was not"
            " verified to be faster."
        ),
        (
            "64 packed sequences, bf16, compiled has 1.01 (0.99 to 1.03, 98 %) times"
            " the throughput of 64 packed sequences, bf16."
        ),
        "Loss: not checked.",
        (
            "Tried 4 of 107 other configurations, 1 of them in one short window; 30"
            " windows in 6 min 52 s."
        ),
        "Reason to stop: the largest expected improvement, 0.2%, is below the noise.",
        "Not searched: precision: you set bf16.",
    ]
    lines = exploration_text(
        explored(equal_loss=None, left_out=[], pruned=0, candidate=explored().starting)
    )
    assert len(lines.splitlines()) == 3
    assert lines.splitlines()[1].startswith(
        "Tried 4 of 107 other configurations; 30 windows"
    )
    assert f"1.01 ({NOT_ENOUGH}) times" in exploration_text(
        explored(ratio_low=None, ratio_high=None)
    )


def test_exploration_orders_trials_by_speed():
    (table,) = of_kind(exploration_section(reported(profile=full_profile("d"))), Table)
    assert [row[0] for row in table.rows] == [
        "64 packed sequences, bf16, compiled",
        "64 packed sequences, bf16",
        "64 bucketed sequences, bf16",
        "64 packed sequences, bf16, full checkpointing",
        "64 packed sequences, bf16, sdpa, compiled",
    ]
    rows = [
        row.model_copy(update={"predicted_ratio": 1.234}) for row in explored().rows
    ]
    assert "sequences, bf16 (predicted: 1.23)." in exploration_text(explored(rows=rows))
    assert table.rows[1] == [
        "64 packed sequences, bf16",
        "18",
        "342,000",
        None,
        "completed",
    ]
    assert table.rows[3][3:] == ["0.720", "pruned"]
    assert table.rows[-1][1:] == ["0", "n/a", None, "crashed"]
    (missing,) = exploration_section(reported())
    assert missing.state == "not requested"
    assert missing.commands == ("autotune tune --model tiny --data DIR --explore",)


@pytest.mark.parametrize(
    ("changes", "expected", "last"),
    [
        (
            {},
            (
                "step predicted",
                "step measured",
                "between nodes",
                "qual loss: after 48 steps",
                (
                    "ax. nodes at 90 % efficiency or more with this global batch"
                    " (predicted):"
                ),
            ),
            "next: autotune network p.toml --predict, or autotune train p.toml --slurm",
        ),
        (
            {
                "link": Link(latency_s=1e-7, bytes_per_s=1e11),
                "strategies": ("ddp",),
                "max_micro_batch_size": 4,
            },
            (
                (
                    "radient synchronisation: the default: no candidate is faster at 98"
                    " % confidence"
                ),
            ),
            "next: ",
        ),
    ],
    ids=["steps", "the default is kept"],
)
def test_network_text_covers_what_was_measured(tmp_path, changes, expected, last):
    tuning = tuning_on(Cluster(link=changes.pop("link", LINK)), tmp_path, **changes)
    tuning.run()
    text = network_text(network_evidence(tuning), Path("p.toml"))
    for words in expected:
        assert words in text
    assert text.splitlines()[-1].startswith(last)


def scaled(nodes, efficiency=1.0, measured=False, low=None, high=None):
    return ScalingRow(
        nodes=nodes,
        strategy="ddp",
        gradient_dtype="fp32",
        bucket_cap_mib=25,
        gradient_accumulation_steps=1,
        micro_batch_size=1,
        step_s=1.0,
        tokens_per_s=100.0 * nodes * efficiency,
        efficiency=efficiency,
        efficiency_low=low,
        efficiency_high=high,
        limit="l",
        measured=measured,
    )


def test_scaling_kinds_are_drawn_apart():
    rows = [
        scaled(1),
        scaled(2, 0.8, low=0.7, high=0.9),
        scaled(2, 0.75, measured=True),
    ]
    predicted, ideal, measured = scaling_lines("tiny", rows).lines
    assert (predicted.kind, ideal.kind, measured.kind) == ("line", "dotted", "dots")
    assert (predicted.points[1].low, predicted.points[1].high) == (140.0, 180.0)
    assert [point.y for point in ideal.points] == [100.0, 200.0]
    assert [point.y for point in measured.points] == [150.0]
    assert [
        line.kind for line in scaling_lines("tiny", [scaled(1, measured=True)]).lines
    ] == ["dots"]


def test_histogram_joins_bins_into_doublings():
    assert length_histogram([0, 8, 16, 24, 32], [1, 0, 3, 1, 2]).splitlines() == [
        "    0 to 7  ##########                                        1   14.3 %",
        "   8 to 15                                                    0    0.0 %",
        "  16 to 31  ########################################          4   57.1 %",
        "32 or more  ####################                              2   28.6 %",
    ]
    assert length_histogram([0, 8], [0, 0]) == ""
    with pytest.raises(ValueError):
        length_histogram([0, 8, 16], [1, 2])


@given(
    st.lists(
        st.integers(0, 10**9),
        min_size=len(HISTOGRAM_EDGES),
        max_size=len(HISTOGRAM_EDGES),
    )
)
def test_every_filled_row_shows_a_bar(counts):
    for line in length_histogram(HISTOGRAM_EDGES, counts).splitlines():
        assert line.isascii()
        assert line.count("#") <= BAR_WIDTH
        assert ("#" in line) == (line.split()[-3] != "0")
