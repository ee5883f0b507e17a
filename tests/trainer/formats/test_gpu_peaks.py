"""Peaks of GPUs by the names that their driver reports."""

import pytest

from trainer.formats.gpu_peaks import PEAKS, peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "bf16_tflops_per_s"),
    [
        # Hopper: PCIe and NVL models are slower than SXM ones, whose names have no such
        # word.
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 144G HBM3e", 989),
        ("NVIDIA H800", 989),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA H20", 148),
        # Blackwell.
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB300", 2500),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438),
        # Ada: the L4, L40 and L40S are different GPUs.
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA GeForce RTX 4090", 165),
        # Ampere.
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
    ],
)
def test_finds_gpu_by_words_of_its_name(name, bf16_tflops_per_s):
    assert peak_flops_per_s(name, "bf16") == bf16_tflops_per_s * 1e12


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("NVIDIA GeForce RTX 4090 D", id="slower than the RTX 4090"),
        pytest.param("NVIDIA GeForce RTX 4090 Laptop GPU", id="laptop"),
        pytest.param("NVIDIA H100 80GB HBM3 MIG 1g.10gb", id="part of a GPU"),
        pytest.param(
            "NVIDIA RTX PRO 6000 Blackwell Server Edition", id="no dense figure: server"
        ),
        pytest.param("NVIDIA A10G", id="no dense figure: A10G"),
        pytest.param("NVIDIA GeForce GTX 1080", id="not in the table"),
        pytest.param("NVIDIA A100X-unknown", id="begins with a name of the table"),
    ],
)
def test_does_not_guess_peaks_of_unknown_gpus(name):
    assert peak_flops_per_s(name, "bf16") is None


@pytest.mark.parametrize("peak", PEAKS, ids=lambda peak: peak.name)
def test_every_peak_has_its_source(peak):
    assert peak.source


@pytest.mark.parametrize("peak", PEAKS, ids=lambda peak: peak.name)
def test_peaks_fall_from_bf16_to_fp32(peak):
    assert peak.bf16_flops_per_s > peak.tf32_flops_per_s >= peak.fp32_flops_per_s
