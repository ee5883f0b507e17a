"""Every command that looks at a GPU, on pretended ones: it ends as it should, and says
what it is to say."""

import itertools
import json
import tomllib

import pytest

pytestmark = pytest.mark.cuda
DRIVER = "580.95.05"
"""Otherwise every rate is rejected, and what measures them ends at once; nothing of it
is kept."""
MODEL = ("--model", "bert-mini", "--seq-length", "64")
QUICK = ("--trial-timeout", "30s", "--global-batch-tokens", "16384")
"""The chosen size is timed for at most a quarter of this."""


class Desk:
    """A machine, a dataset, and a profile that is to be written there."""

    def __init__(self, machine, data):
        self._machine, self.data = machine, data
        self.profile = machine.folder / "profile.toml"

    def __call__(self, *words):
        ended = self._machine.autotune(*words, timeout_s=400)
        assert ended.code == 0, ended
        return ended

    def probe(self, words, profile=None):
        self(
            "probe",
            *MODEL,
            *QUICK,
            "--data",
            self.data,
            "--out",
            profile or self.profile,
            *words.split(),
        )
        return self

    def tables(self):
        return tomllib.loads(self.profile.read_text())


@pytest.fixture(scope="module")
def desk(null_gpus, data) -> Desk:
    return Desk(null_gpus(driver=DRIVER), data).probe(
        "--max-micro-batch-size 64 --no-compile"
    )


def test_estimate_uses_no_gpu(desk):
    ended = desk("estimate", *MODEL, "--gpu", "h100-nvl-94gb", "--no-compile", "--json")
    assert json.loads(ended.out)
    assert ended.counts.total("kernel") == 0


def test_probe_writes_a_profile_for_this_gpu(desk):
    train = desk.tables()["train"]
    assert (train["device"], train["precision"]) == ("cuda", "bf16")
    assert 1 <= train["micro_batch_size"] <= 64


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "--tokens", "1M"), "H100"),
        (("advise",), "would change this"),
        (("report",), "report.html"),
        (("profile", "verify"), "content:"),
        (("profile", "show", "--explain"), "micro_batch_size"),
    ],
)
def test_commands_use_the_profile(desk, words, said):
    ended = desk(*words, desk.profile)
    assert said in ended.out, ended


@pytest.mark.soak
def test_probes_for_a_smaller_gpu(desk, tmp_path):
    words = (
        "--max-micro-batch-size 32 --gpu a100-40gb --precision fp32 --layout padded"
        " --activation-checkpointing full"
    )
    words += " --no-compile"
    desk.probe(words, tmp_path / "smaller.toml")
    train = tomllib.loads((tmp_path / "smaller.toml").read_text())["train"]
    assert (train["precision"], train["layout"], train["activation_checkpointing"]) == (
        "fp32",
        "padded",
        "full",
    )


def test_measures_the_network_of_two_gpus(null_gpu, data):
    words = (
        "--max-micro-batch-size 4 --ranks 2 --layout bucketed"
        " --activation-checkpointing selective --no-compile"
    )
    desk = Desk(null_gpu(devices=2, driver=DRIVER), data).probe(words)
    assert 1 <= desk.tables()["train"]["micro_batch_size"] <= 4
    assert (
        "within nodes"
        in desk("network", desk.profile, "--data", data, "--time-limit", "0.1min").out
    )
    network = desk.tables()["evidence"]["network"]
    assert [link["members"] for link in network["links"]] == [2]
    assert len(network["matmul_flops_per_s"]) == 2
    assert any(row["step_s"] for row in network["gradient_syncs"])


@pytest.mark.soak  # each trial compiles
def test_tune_explores(null_gpu, data):
    desk = Desk(null_gpu(driver=DRIVER), data)
    words = (
        "--explore --time-limit 6min --trial-timeout 90s --max-micro-batch-size 4"
        " --precision bf16 --window 0.2s"
    )
    words += " --skip workers --skip baseline"
    desk("tune", *MODEL, *QUICK, "--data", data, *words.split(), "--out", desk.profile)
    explored = desk.tables()["evidence"]["explore"]
    assert explored["windows"] > 0
    assert explored["trials"] > 1


ALL = list(
    itertools.product(
        ("none", "selective", "full"),
        ("bf16", "fp32"),
        ("packed", "bucketed", "padded"),
    )
)


@pytest.mark.soak
@pytest.mark.parametrize(("activation_checkpointing", "precision", "layout"), ALL)
def test_probes_every_combination_of_settings(
    desk, tmp_path, activation_checkpointing, precision, layout
):
    words = (
        "--max-micro-batch-size 16 --activation-checkpointing"
        f" {activation_checkpointing} --precision {precision}"
    )
    words += f" --layout {layout}"
    desk.probe(words, tmp_path / "profile.toml")


@pytest.mark.soak
def test_estimate_compares_alternatives(desk):
    assert (
        "alternatives: "
        in desk("estimate", *MODEL, "--gpu", "h100-nvl-94gb", "--what-if").err
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", ["h100-sxm-80gb", "h200-141gb", "a100-80gb", "l40s-48gb", "rtx-4090-24gb"]
)
def test_probes_other_gpus(null_gpu, data, name):
    Desk(null_gpu(name=name), data).probe("--max-micro-batch-size 16")
