"""Reports of several profiles in one directory."""

import json

from autotune.report.stage import build_report


def test_report_of_several_profiles_replaces_older_one(workdir):
    profile = workdir / "p.toml"
    other_profile = workdir / "other.toml"
    other_profile.write_text(profile.read_text())
    out = workdir / "r" / "both"
    build_report([profile], workdir / "r", out)
    profile.write_text(profile.read_text().replace('"tiny"', '"teeny"'))
    paths = build_report([profile, other_profile], workdir / "r", out)
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "both.html",
        "both.json",
        "both.md",
    ]
    assert len(json.loads(paths["json"].read_text())["profiles"]) == 2
    assert "teeny" in paths["markdown"].read_text()
