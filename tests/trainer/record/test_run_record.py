import json
import shutil
from pathlib import Path

import pytest

import trainer
from testbed.examples.checkpoints import header_of
from trainer.errors import BadConfig
from trainer.record import run_record
from trainer.record.writer import RunWriter


def test_rejects_directory_without_a_run(tmp_path):
    with pytest.raises(BadConfig, match="not a run"):
        run_record.read_run(tmp_path)


@pytest.mark.parametrize("version", [2, 9])
def test_rejects_other_schema_version(tmp_path, version):
    writer = RunWriter(tmp_path / "r", active=True)
    writer.start(header_of())
    path = tmp_path / "r" / "run.json"
    header = json.loads(path.read_text())
    path.write_text(json.dumps(header | {"schema_version": version}))
    with pytest.raises(BadConfig):
        run_record.read_run(tmp_path / "r")


def test_code_hash_covers_the_whole_trainer(tmp_path):
    package = tmp_path / "trainer"
    shutil.copytree(Path(trainer.__file__).parent, package)
    assert run_record.code_sha256(package) == run_record.code_sha256()
    (package / "loop.py").write_text("")
    assert run_record.code_sha256(package) != run_record.code_sha256()
