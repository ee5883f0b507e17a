import json
import zipfile
from dataclasses import replace

import pytest

from benchmarks.gpu import keep as keeping
from benchmarks.gpu.keep import keep
from tests.benchmarks.gpu.reports import full_report


def found(tmp_path, report):
    place = tmp_path / "found"
    place.mkdir()
    (place / "gpu-check.json").write_text(json.dumps(report.to_json()))
    (place / "ledger.jsonl").write_text("{}\n")
    with zipfile.ZipFile(place / "tune.zip", "w") as packed:
        packed.writestr("profiles/bert-120m-h200.toml", "# a profile\n")
    return place


def test_a_check_is_kept_by_gpu_and_date_and_its_archive_unpacked(tmp_path):
    place = keep(found(tmp_path, full_report()), tmp_path / "kept")
    assert place == tmp_path / "kept" / "h200" / "2026-01-01"
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    assert files == ["gpu-check.html", "gpu-check.json", "ledger.jsonl", "tune/profiles/bert-120m-h200.toml"]


def test_one_of_the_same_day_is_replaced(tmp_path):
    place = keep(found(tmp_path, full_report()), tmp_path / "kept")
    (place / "old").touch()
    keep(tmp_path / "found", tmp_path / "kept")
    assert not (place / "old").exists()


def test_a_check_of_the_check_itself_is_refused(tmp_path, capsys):
    directory = found(tmp_path, replace(full_report(), sizes="tiny", bars=()))
    with pytest.raises(ValueError, match="sizes are tiny"):
        keep(directory, tmp_path / "kept")
    assert keeping.main([str(directory)]) == 2
    assert "next: where there is a GPU, python -m benchmarks.gpu.all" in capsys.readouterr().err
