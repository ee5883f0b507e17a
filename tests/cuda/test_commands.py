"""Every command that uses a GPU, on pretended ones."""

import itertools
import json
import tomllib

import pytest

pytestmark = pytest.mark.cuda
DRIVER = "580.95.05"
"""Version of a real driver: with that of a pretended GPU, every rate is rejected, and
commands that measure rates end at once."""
MODEL = ("--model", "bert-mini", "--seq-length", "64")
GLOBAL_BATCH = ("--global-batch-tokens", "16384")
TRIAL_TIMEOUT = {"eager": "30s", "compiled": "120s"}
"""Time limits of trials. They are short, as the chosen size is timed for a quarter of
the limit, but suffice to compile layers beside other tests."""


class GpuUser:
    """You, with a pretended GPU, a dataset, and a profile to write."""

    def __init__(self, machine, data):
        self._machine = machine
        self.data = data
        self.profile = machine.folder / "profile.toml"

    def autotune(self, *arguments):
        ended = self._machine.autotune(*arguments, timeout_s=1200)
        assert ended.code == 0, ended
        return ended

    def probe(self, options, profile=None):
        out = profile or self.profile
        paths = ("--data", self.data, "--out", out)
        kind = "eager" if "--no-compile" in options else "compiled"
        limit = ("--trial-timeout", TRIAL_TIMEOUT[kind])
        self.autotune("probe", *MODEL, *GLOBAL_BATCH, *limit, *paths, *options.split())
        return self

    def tables(self):
        return tomllib.loads(self.profile.read_text())


@pytest.fixture(scope="module")
def user(null_gpus, data) -> GpuUser:
    """A user who has a profile."""
    user = GpuUser(null_gpus(driver=DRIVER), data)
    return user.probe("--max-micro-batch-size 64 --no-compile")


def test_estimate_uses_no_gpu(user):
    ended = user.autotune(
        "estimate", *MODEL, "--gpu", "h100-nvl-94gb", "--no-compile", "--json"
    )
    assert json.loads(ended.out)
    assert ended.counts.total("kernel") == 0


def test_probe_writes_a_profile_for_this_gpu(user):
    train = user.tables()["train"]
    assert train["device"] == "cuda"
    assert train["precision"] == "bf16"
    assert 1 <= train["micro_batch_size"] <= 64


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (("plan", "--tokens", "1M"), "H100"),
        (("advise",), "would change this"),
        (("report",), "report.html"),
        (("profile", "verify"), "content:"),
        (("profile", "show", "--explain"), "micro_batch_size"),
    ],
)
def test_commands_use_the_profile(user, command, output):
    ended = user.autotune(*command, user.profile)
    assert output in ended.out, ended


@pytest.mark.soak
def test_probes_for_a_smaller_gpu(user, tmp_path):
    profile = tmp_path / "smaller.toml"
    user.probe(
        "--max-micro-batch-size 32 --gpu a100-40gb --precision fp32 --layout padded"
        " --activation-checkpointing full --no-compile",
        profile,
    )
    train = tomllib.loads(profile.read_text())["train"]
    assert train["precision"] == "fp32"
    assert train["layout"] == "padded"
    assert train["activation_checkpointing"] == "full"


@pytest.mark.soak  # the table of capabilities has it for a sampled subject
def test_measures_the_network_of_two_gpus(null_gpu, data):
    user = GpuUser(null_gpu(devices=2, driver=DRIVER), data)
    user.probe(
        "--max-micro-batch-size 4 --ranks 2 --layout bucketed"
        " --activation-checkpointing selective --no-compile"
    )
    assert 1 <= user.tables()["train"]["micro_batch_size"] <= 4
    ended = user.autotune(
        "network", user.profile, "--data", data, "--time-limit", "3min"
    )
    assert "within nodes" in ended.out
    network = user.tables()["evidence"]["network"]
    assert [link["members"] for link in network["links"]] == [2]
    assert len(network["matmul_flops_per_s"]) == 2
    assert any(row["step_s"] for row in network["gradient_syncs"])


@pytest.mark.soak  # each trial compiles
def test_tune_explores(null_gpu, data):
    user = GpuUser(null_gpu(driver=DRIVER), data)
    options = (
        f"--explore --time-limit 12min --trial-timeout {TRIAL_TIMEOUT['compiled']}"
        " --max-micro-batch-size 4 --precision bf16 --window 0.2s"
        " --skip workers --skip baseline"
    )
    paths = ("--data", data, "--out", user.profile)
    user.autotune("tune", *MODEL, *GLOBAL_BATCH, *options.split(), *paths)
    exploration = user.tables()["evidence"]["explore"]
    assert exploration["windows"] > 0
    assert exploration["trials"] > 1


ALL_COMBINATIONS = list(
    itertools.product(
        ("none", "selective", "full"),
        ("bf16", "fp32"),
        ("packed", "bucketed", "padded"),
    )
)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("activation_checkpointing", "precision", "layout"), ALL_COMBINATIONS
)
def test_probes_every_combination_of_settings(
    user, tmp_path, activation_checkpointing, precision, layout
):
    user.probe(
        "--max-micro-batch-size 16"
        f" --activation-checkpointing {activation_checkpointing}"
        f" --precision {precision} --layout {layout}",
        tmp_path / "profile.toml",
    )


@pytest.mark.soak
def test_estimate_compares_alternatives(user):
    ended = user.autotune("estimate", *MODEL, "--gpu", "h100-nvl-94gb", "--what-if")
    assert "alternatives: " in ended.err


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", ["h100-sxm-80gb", "h200-141gb", "a100-80gb", "l40s-48gb", "rtx-4090-24gb"]
)
def test_probes_other_gpus(null_gpu, data, name):
    GpuUser(null_gpu(name=name), data).probe("--max-micro-batch-size 16")
