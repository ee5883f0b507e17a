import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.model.flops import PEAKS, attended_pairs, peak_flops_per_s


@given(length=st.integers(1, 60), reach=st.one_of(st.none(), st.integers(0, 40)))
def test_counts_pairs_within_reach(length, reach):
    pairs = itertools.product(range(length), repeat=2)
    assert attended_pairs(np.array([length]), reach) == sum(
        reach is None or abs(query - key) <= reach for query, key in pairs
    )


def test_flops_match_count_of_torch(dataset):
    """In sequences that one document fills, torch counts the matmuls that we count.

    Attention is compared on its own: torch's backward of attention multiplies 5 times
    instead of 4, as it computes the scores again.
    """
    config = config_of(layout="padded", seq_length_tokens=16)
    training = training_of(config, dataset)
    tokens = 8 * 16
    batch = next(
        batch
        for batch in micro_batches(dataset, config, steps=30)
        if batch.non_padding_tokens == tokens
    )
    with FlopCounterMode(display=False) as counter:
        training.module(batch).backward()
    matmuls = sum(
        count
        for name, count in counter.get_flop_counts()["Global"].items()
        if "mm" in str(name)
    )
    work = training.work
    expected_matmuls = 6 * (
        work.weights_per_token * tokens
        + work.weights_per_predicted_token * batch.predicted_tokens
    )
    assert expected_matmuls == matmuls

    lengths = batch.tokens_N.numpy().astype(np.int64)
    attention = work.step_flops(lengths, batch.predicted_tokens) - expected_matmuls
    # Two layers of width 32, the last one for tokens to predict only.
    pairs = (1 + batch.predicted_tokens / tokens) * tokens * 16
    assert attention == pytest.approx(6 * 2 * 32 * pairs)


def test_sliding_windows_cost_less(dataset):
    work = training_of(config_of("modernbert"), dataset).work
    assert work.reaches == (None, 4, 4, None)
    everywhere = dataclasses.replace(work, reaches=(None,) * 4)
    assert work.step_flops(np.array([60]), 9) < everywhere.step_flops(np.array([60]), 9)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H800", 989),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 144G HBM3e", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB300", 2500),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA L40", 181),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA A100X-unknown", None),
    ],
)
def test_finds_device_by_words_of_its_name(name, tera):
    assert peak_flops_per_s(name, "bf16") == (None if tera is None else tera * 1e12)


@pytest.mark.parametrize("peak", PEAKS, ids=lambda peak: peak.name)
def test_every_peak_has_its_source(peak):
    assert peak.source


@pytest.mark.parametrize("peak", PEAKS, ids=lambda peak: peak.name)
def test_peaks_fall_from_bf16_to_fp32(peak):
    assert peak.bf16 > peak.tf32 >= peak.fp32
