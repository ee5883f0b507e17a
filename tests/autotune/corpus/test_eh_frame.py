import contextlib
from pathlib import Path

import pytest
from elftools.dwarf.callframe import FDE
from elftools.elf.elffile import ELFFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.corpus.eh_frame import DamagedFramesError, function_ranges


def frames_of(program: Path) -> tuple[bytes, int]:
    with program.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".eh_frame")
        return section.data(), section["sh_addr"]


def test_ranges_are_those_that_pyelftools_reads(first_program):
    with first_program.open("rb") as file:
        entries = ELFFile(file).get_dwarf_info(relocate_dwarf_sections=False).EH_CFI_entries()
        truth = [
            (entry.header.initial_location, entry.header.address_range) for entry in entries if isinstance(entry, FDE)
        ]
    assert list(function_ranges(*frames_of(first_program))) == truth


def test_every_function_of_the_symbol_table_has_its_range(second_program):
    with second_program.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".symtab").iter_symbols()
        named = {s.name: (s["st_value"], s["st_size"]) for s in symbols if s["st_info"]["type"] == "STT_FUNC"}
    ranges = set(function_ranges(*frames_of(second_program)))
    for name in ("before", "helper", "shared", "main"):
        assert named[name] in ranges


def test_an_empty_section_holds_no_function():
    assert list(function_ranges(b"", 0)) == []
    assert list(function_ranges(bytes(8), 0)) == []


@pytest.mark.parametrize(
    "section",
    [
        b"\xff\xff\xff\xff" + bytes(16),
        b"\x02\x00\x00\x00\x00\x00",
        b"\x10\x00\x00\x00" + bytes(4),
        b"\x10\x00\x00\x00\x09" + bytes(15),
        b"\x08\x00\x00\x00" + bytes(4) + b"\x09" + bytes(3),
        b"\x08\x00\x00\x00" + bytes(4) + b"\x01eh\x00",
        b"\x14\x00\x00\x00" + bytes(4) + b"\x01zR\x00" + b"\xff" * 12,
    ],
    ids=["64-bit", "shorter than its id", "past the end", "no such CIE", "version", "augmentation", "endless number"],
)
def test_a_malformed_section_is_named_as_such(section):
    with pytest.raises(DamagedFramesError, match=r"\.eh_frame"):
        list(function_ranges(section, 0x1000))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_give_ranges_or_the_one_error(section):
    with contextlib.suppress(DamagedFramesError):
        list(function_ranges(section, 0))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_to_a_real_table_gives_ranges_or_the_one_error(first_program, data):
    section, address = frames_of(first_program)
    damaged = bytearray(section)
    places = st.tuples(st.integers(0, len(section) - 1), st.integers(0, 255))
    for place, value in data.draw(st.lists(places, max_size=8)):
        damaged[place] = value
    ranges = []
    with contextlib.suppress(DamagedFramesError):
        ranges.extend(function_ranges(bytes(damaged), address))
    # Every entry takes at least its length and id, so damage cannot multiply them.
    assert len(ranges) <= len(section) // 8
    assert all(0 <= first < 2**64 and size >= 0 for first, size in ranges)
