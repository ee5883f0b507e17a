from pathlib import Path

from autotune.core.network import Link
from autotune.search.scaling import evidence
from autotune.show.network import network_text
from tests.autotune.search.exchanges import LINK, Cluster, tuning_on


def shown(tmp_path, *, links_only=False, link=LINK, **request):
    tuning = tuning_on(Cluster(link=link), tmp_path, **request)
    if links_only:
        tuning.measure_links()
    else:
        tuning.run()
    return network_text(evidence(tuning), Path("p.toml"))


def test_predicted_and_measured_stand_beside_each_other(tmp_path):
    text = shown(tmp_path)
    assert "step predicted" in text
    assert "step measured" in text
    assert "between nodes" in text
    assert "useful nodes at this global batch (at least 90 % efficient, predicted):" in text
    assert "equal loss: after 48 steps" in text
    assert text.splitlines()[-1].startswith("next: autotune scale --profile p.toml")


def test_what_was_not_measured_is_said(tmp_path):
    text = shown(tmp_path, links_only=True)
    assert "only the links were measured" in text
    assert text.splitlines()[-1] == "next: autotune network --profile p.toml (with training steps, which decide)"


def test_the_default_is_kept_where_nothing_is_faster(tmp_path):
    text = shown(tmp_path, link=Link(latency_s=1e-7, bytes_per_s=1e11), strategies=("ddp",), most_rows=4)
    assert "exchange: the default: nothing that was measured is proven to be faster" in text
