import re

import pytest

from tests.documentation.blocks import ELLIPSIS
from tests.documentation.outputs import line_pattern, words_of
from tests.documentation.typed_commands import typed

OF_THE_MACHINE = re.compile(r"^(CPU|cpu_model) |^Wait until the machine is quiet")
"""Lines that differ by machine; the page was written on a busy one, and says so."""
SPLIT = "origin measured: 32 = 3 x 11 (accumulation x micro-batch) "
FITS = "; 15 is the largest that fits"
RATIOS = re.compile(r"( +\S+x \(\S+x to \S+x\)){2}$")
"""Speedups over untuned settings and over padding, at the end of a row."""
REASONS = (
    "is the smallest micro-batch within 2% of the shortest predicted step;"
    " 32 = 2 x 16 would take 0.0% less time",
    "is the smallest micro-batch within 2% of the shortest predicted step;"
    " 32 = 2 x 16 would take 0.0% more time",
    "has the shortest predicted step",
)
"""Reasons for a micro-batch size: which one applies depends on measured speeds."""


def patterns_of(line: str) -> list[re.Pattern[str]]:
    """Return patterns of all lines that a command may print where a page shows one."""
    shown = line_pattern(line)
    reasons = [
        line_pattern(f"{SPLIT}{reason}{FITS}{headroom}")
        for reason in REASONS
        for headroom in ("", ", but leaves no headroom")
    ]
    is_reason = any(reason.fullmatch(words_of(line)) for reason in reasons)
    if is_reason:
        return reasons
    # A busy machine may leave no time for the baseline.
    without_baseline = RATIOS.sub("  n/a", line).removesuffix("vs padded")
    return [shown, line_pattern(without_baseline)]


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        pytest.param("32 = 3 x 11", "4 = 1 x 4", id="counts"),
        pytest.param("elf, 37 files", "elf, 1 file", id="singular"),
        pytest.param("elf, 1 file", "elf, 1,024 files", id="plural"),
        pytest.param("a    1,000  b", "a 96 b", id="alignment"),
        pytest.param("6.08 MiB (-34.0 %)", "952 KiB (+2.5 %)", id="binary sizes"),
        pytest.param("took 6 min 52 s", "took 3.4 s", id="durations"),
        pytest.param("2.32x (2.05x to 2.63x)", "10.00x (9.15x to 11.02x)", id="ratios"),
        pytest.param("2.32x (2.05x to 2.63x)", "2.41x", id="without interval"),
        pytest.param("6,209 (5,969 to 6,460)", "n/a", id="not measured"),
        pytest.param("--memory 40GB", "--memory 8GB", id="options"),
    ],
)
def test_numbers_match_numbers_of_their_kind(shown, printed):
    assert line_pattern(shown).fullmatch(words_of(printed))


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        pytest.param("32 = 3 x 11", "32 = 3 x 11 x 2 ranks", id="form"),
        pytest.param("32 = 3 x 11", "32 sequences", id="words"),
        pytest.param("37 files", "37 file", id="singular of several"),
        pytest.param("--memory 40GB", "--memory 952MiB", id="decimal and binary"),
        pytest.param("40GB", "952 MiB", id="space before unit"),
        pytest.param("4.01 MiB", "4.01", id="unit"),
        pytest.param("2.32x", "2x", id="decimals"),
        pytest.param("2.32x (2.05x to 2.63x)", "2 (1 to 3)", id="ratio and count"),
        pytest.param("2.32x", "n/a", id="no interval shown"),
        pytest.param("12 ms", "12 MiB", id="duration and size"),
        pytest.param("-34.0 %", "34.0 %", id="sign"),
        pytest.param("uint16", "uint32", id="digits of a word"),
        pytest.param("micro_batch_size = 11", "batch_size = 11", id="key"),
    ],
)
def test_other_forms_of_numbers_do_not_match(shown, printed):
    assert not line_pattern(shown).fullmatch(words_of(printed))


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        (
            "model  batch  tokens/s  vs untuned  vs padded",
            "model batch tokens/s vs untuned",
        ),
        (
            "m  32 = 4 x 8  4,885 (3,291 to 7,251)  2.1x (1.7x to 2.6x)  2x (1x to 3x)",
            "m 32 = 2 x 16 1,926 n/a",
        ),
    ],
    ids=["header", "row"],
)
def test_table_may_lack_the_baseline(shown, printed):
    assert any(pattern.fullmatch(printed) for pattern in patterns_of(shown))


@pytest.mark.slow
@pytest.mark.system
def test_quickstart_prints_what_it_shows(tmp_path):
    for command, process in typed("docs/quickstart.md", tmp_path):
        plain = process.stdout.replace("\033[1m", "").replace("\033[0m", "")
        printed = [words_of(line) for line in plain.splitlines()]
        missing = [
            line
            for line in command.prints
            if line.strip()
            and line != ELLIPSIS
            and not OF_THE_MACHINE.search(words_of(line))
            and not any(
                pattern.fullmatch(real)
                for pattern in patterns_of(line)
                for real in printed
            )
        ]
        assert missing == [], (
            f"{command.where} prints other lines than the page shows:\n{process.stdout}"
        )
