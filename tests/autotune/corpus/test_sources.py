import os

import pytest

from autotune.corpus.sources import find_elf_files
from autotune.errors import BadInput


def program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF" + path.name.encode())
    return path


def names(found):
    return [file.path.name for file in found.files]


def test_a_directory_is_read_with_all_below_it(tmp_path):
    program(tmp_path / "a")
    program(tmp_path / "below" / "deep" / "b")
    (tmp_path / "text").write_text("hello")
    found = find_elf_files(f"elf:{tmp_path}")
    assert sorted(names(found)) == ["a", "b"]
    assert found.other_files == 1
    assert found.files[0].size_bytes == 5


def test_a_file_or_a_glob_can_be_named(tmp_path):
    for name in ("one", "two", "three"):
        program(tmp_path / name)
    assert names(find_elf_files(f"elf:{tmp_path / 'one'}")) == ["one"]
    assert sorted(names(find_elf_files(f"elf:{tmp_path}/t*"))) == ["three", "two"]


def test_a_file_with_several_names_is_read_once_under_its_own(tmp_path):
    program(tmp_path / "z-real")
    os.link(tmp_path / "z-real", tmp_path / "z-second")
    (tmp_path / "a-link").symlink_to("z-real")
    (tmp_path / "dangling").symlink_to("nowhere")
    found = find_elf_files(f"elf:{tmp_path}")
    assert names(found) == ["z-real"]
    assert found.other_files == 0
    assert found.unreadable == ()


def test_linked_directories_and_special_files_are_not_entered(tmp_path):
    program(tmp_path / "a")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert names(find_elf_files(f"elf:{tmp_path}")) == ["a"]


def test_the_order_is_that_of_the_names_wherever_the_tree_lies(tmp_path):
    many = [f"program-{number}" for number in range(20)]
    for name in many:
        program(tmp_path / "here" / name)
    for name in reversed(many):
        program(tmp_path / "there" / name)
    here = names(find_elf_files(f"elf:{tmp_path / 'here'}"))
    assert here == names(find_elf_files(f"elf:{tmp_path / 'there'}"))
    assert here != sorted(here)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_listed(tmp_path):
    program(tmp_path / "a")
    program(tmp_path / "closed").chmod(0)
    found = find_elf_files(f"elf:{tmp_path}")
    assert [item.path.name for item in found.unreadable] == ["closed"]


@pytest.mark.parametrize(
    ("source", "message", "next_step"),
    [
        ("elfs:/usr/bin", "'elfs'", "elf:/usr/bin"),
        ("parquet:/data", "'parquet'", "Known kinds: elf"),
        ("/usr/bin", "no kind", "elf:/usr/bin"),
        ("elf:", "no place", "elf:/usr/bin"),
        ("elf:/no/such/place", "/no/such/place", "path"),
        ("elf:/no/such/*", "no file matches", "pattern"),
    ],
)
def test_a_source_that_cannot_be_read_says_what_to_write(source, message, next_step):
    with pytest.raises(BadInput) as error:
        find_elf_files(source)
    assert message in error.value.message
    assert next_step in error.value.next_step


def test_places_without_programs_are_refused(tmp_path):
    with pytest.raises(BadInput, match="holds no files"):
        find_elf_files(f"elf:{tmp_path}")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(BadInput, match="none of the 1 files"):
        find_elf_files(f"elf:{tmp_path}")
