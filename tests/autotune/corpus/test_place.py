import os
import stat

import pytest

from autotune.corpus import place
from autotune.corpus.place import build_beside, check_place
from autotune.errors import BadInput


def build(out, text="new", *, overwrite=False):
    with build_beside(out, overwrite=overwrite) as build_place:
        (build_place.dataset / "manifest.json").write_text(text)


def test_a_finished_dataset_appears_and_nothing_else_remains(tmp_path):
    build(tmp_path / "below" / "data")
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["data"]
    assert (tmp_path / "below" / "data" / "manifest.json").read_text() == "new"


def test_the_work_is_private_and_the_result_like_any_directory(tmp_path):
    ordinary = tmp_path / "ordinary"
    ordinary.mkdir()
    with build_beside(tmp_path / "data", overwrite=False) as build_place:
        assert stat.S_IMODE(build_place.dataset.parent.stat().st_mode) == 0o700
    assert (tmp_path / "data").stat().st_mode == ordinary.stat().st_mode


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_unfinished_dataset_leaves_nothing(tmp_path, error):
    with pytest.raises(error), build_beside(tmp_path / "data", overwrite=False):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_plainly(tmp_path):
    with pytest.raises(BadInput, match=r"cannot write .*No space left"), build_beside(tmp_path / "d", overwrite=False):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_is_used(tmp_path):
    (tmp_path / "data").mkdir()
    build(tmp_path / "data")
    assert (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_is_no_dataset_is_never_replaced(tmp_path, overwrite):
    (tmp_path / "precious").write_text("work")
    with pytest.raises(BadInput, match="'precious'"):
        build(tmp_path, overwrite=overwrite)
    assert (tmp_path / "precious").read_text() == "work"


def test_a_dataset_is_replaced_only_on_request(tmp_path):
    out = tmp_path / "data"
    build(out, "old")
    with pytest.raises(BadInput) as error:
        build(out)
    assert "--overwrite" in error.value.next_step
    assert (out / "manifest.json").read_text() == "old"
    build(out, overwrite=True)
    assert (out / "manifest.json").read_text() == "new"
    assert list(tmp_path.iterdir()) == [out]


def test_a_dataset_with_other_files_in_it_is_not_replaced(tmp_path):
    out = tmp_path / "data"
    build(out, "old")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"notes\.txt"):
        build(out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


def test_an_old_dataset_survives_a_failed_replacement(tmp_path):
    out = tmp_path / "data"
    build(out, "old")
    with pytest.raises(RuntimeError), build_beside(out, overwrite=True):
        raise RuntimeError
    assert (out / "manifest.json").read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_system_that_cannot_swap_is_served_too(tmp_path, monkeypatch):
    class OldLibrary:
        """A C library without renameat2."""

    monkeypatch.setattr(place.ctypes, "CDLL", lambda *_, **__: OldLibrary())
    out = tmp_path / "data"
    build(out, "old")
    build(out, overwrite=True)
    assert (out / "manifest.json").read_text() == "new"
    assert list(tmp_path.iterdir()) == [out]


def test_what_appeared_during_the_work_is_not_lost(tmp_path):
    out = tmp_path / "data"
    with pytest.raises(BadInput, match="'late'"), build_beside(out, overwrite=False):
        out.mkdir()
        (out / "late").write_text("work")
    assert (out / "late").read_text() == "work"


def test_a_link_is_kept_and_its_target_filled(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    build(tmp_path / "data")
    assert (tmp_path / "data").is_symlink()
    assert (tmp_path / "disk" / "manifest.json").exists()


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "data").write_text("work")
    with pytest.raises(BadInput, match="not a directory"):
        check_place(tmp_path / "data", overwrite=True)


def test_a_place_that_cannot_be_written_is_known_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write"), build_beside(tmp_path / "file" / "data", overwrite=False):
        pytest.fail("the work began")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="Permission denied"):
        build(tmp_path / "data")
