import shutil
from pathlib import Path

import pytest

import trainer
from trainer.formats.code_hash import code_sha256


@pytest.fixture
def package(tmp_path):
    """A copy of the trainer."""
    package = tmp_path / "trainer"
    shutil.copytree(Path(trainer.__file__).parent, package)
    return package


def test_equal_copies_have_the_same_hash(package):
    assert code_sha256(package) == code_sha256()


def test_changed_source_has_another_hash(package):
    (package / "loop.py").write_text("")
    assert code_sha256(package) != code_sha256()


def test_moved_source_has_another_hash(package):
    (package / "loop.py").rename(package / "training_loop.py")
    assert code_sha256(package) != code_sha256()
