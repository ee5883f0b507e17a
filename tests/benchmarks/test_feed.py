import json

from benchmarks import feed


def test_every_contender_is_measured_and_every_bar_is_a_ratio_of_the_same_run(tmp_path, capsys):
    path = tmp_path / "feed.json"
    code = feed.main(["--samples", "600", "--repeats", "1", "--window-s", "0.01", "--json", str(path)])
    told = capsys.readouterr().out
    content = json.loads(path.read_text())
    assert code in (0, 1)
    rates = content["rates"]
    assert len(rates) == 8
    assert all(len(found["samples_per_s"]) == 1 for found in rates.values())
    bars = {bar["name"]: bar for bar in content["bars"]}
    plain = rates["padded, full rows"]["samples_per_s"][0] / rates["plain, full rows"]["samples_per_s"][0]
    assert bars["feed_against_plain_ratio"]["figure"] == plain
    assert bars["feed_packing_efficiency_share"]["figure"] > 0.98
    assert "feed_packed_real_tokens_ratio figure=" in told.splitlines()[-2]


def test_packing_without_full_samples_is_never_better_than_with_them():
    found = feed.packing_efficiency(5000)
    assert found["padded"] < found["without_full_samples"] <= found["all"] <= 1
