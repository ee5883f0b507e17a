"""The page cache of real files on this machine's disk."""

import os

import pytest

from autotune.measure import page_cache
from autotune.measure.page_cache import cached_share, fetch
from trainer.dataset import TokenDataset


@pytest.fixture
def files(make_dataset):
    dataset = TokenDataset.open(make_dataset([[7] * 500] * 2000))
    if cached_share(dataset.files) is None:
        pytest.skip("this system does not say what lies in memory")
    dataset.forget()
    yield dataset.files
    dataset.close()


def test_files_that_were_fetched_lie_in_memory_and_forgotten_ones_do_not(files):
    assert cached_share(files) == 0.0
    fetch(files)
    assert cached_share(files) == 1.0


def test_looking_brings_nothing_in(files):
    assert [cached_share(files) for _ in range(5)] == [0.0] * 5


def test_half_of_a_file_is_half(files):
    size = files[0].stat().st_size
    with files[0].open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(size // 2)
    assert cached_share(files[:1]) == pytest.approx(0.5, abs=0.05)


def test_progress_of_fetching_ends_at_all_bytes(files):
    told = []
    fetch(files, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == sum(file.stat().st_size for file in files)


@pytest.fixture
def older_kernel(monkeypatch):
    """A kernel before 6.5, which has no call that counts the pages of a file."""
    monkeypatch.setattr(page_cache, "_counted", lambda *_: None)


@pytest.mark.usefixtures("older_kernel")
def test_an_older_kernel_is_asked_by_a_mapping(files):
    assert [cached_share(files) for _ in range(3)] == [0.0] * 3
    fetch(files)
    assert cached_share(files) == 1.0


@pytest.mark.usefixtures("older_kernel")
def test_files_longer_than_one_mapping_are_added_up(files, monkeypatch):
    size = files[0].stat().st_size
    monkeypatch.setattr(page_cache, "_MAPPED_BYTES", 2**16)
    with files[0].open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(size // 2)
    assert cached_share(files[:1]) == pytest.approx(0.5, abs=0.05)


@pytest.mark.usefixtures("older_kernel")
def test_an_older_kernel_says_nothing_of_files_that_one_may_not_write(files, monkeypatch):
    monkeypatch.setattr(page_cache.os, "access", lambda *_: False)
    assert cached_share(files) is None


@pytest.mark.usefixtures("older_kernel")
def test_an_empty_file_has_nothing_in_memory(tmp_path):
    (tmp_path / "empty").touch()
    assert cached_share([tmp_path / "empty"]) is None
