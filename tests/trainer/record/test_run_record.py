import json
import shutil
import time
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


def test_every_second_of_startup_belongs_to_a_phase(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    monkeypatch.setattr(time, "monotonic", lambda: 500.0)
    clock = run_record.StartClock(began_s=990.0)
    phases = [
        ("import", 0),  # began 10 s before
        ("staging", 2),
        ("build", 1),
        ("first_batch", 1),
        ("build", 2),
        ("first_step", 4),
    ]
    for phase, seconds in phases:
        now_s += seconds
        clock.ended(phase)
    now_s += 50  # later steps are no part of the start
    startup = clock.startup().model_dump()
    assert {name: seconds for name, seconds in startup.items() if seconds} == {
        "import_s": 10,
        "staging_s": 2,
        "build_s": 3,
        "first_batch_s": 1,
        "first_step_s": 4,
        "total_s": 20,
    }
    assert clock.total_s() == 70
    assert clock.monotonic_start_s == 490


def test_code_hash_covers_the_whole_trainer(tmp_path):
    package = tmp_path / "trainer"
    shutil.copytree(Path(trainer.__file__).parent, package)
    assert run_record.code_sha256(package) == run_record.code_sha256()
    (package / "loop.py").write_text("")
    assert run_record.code_sha256(package) != run_record.code_sha256()
