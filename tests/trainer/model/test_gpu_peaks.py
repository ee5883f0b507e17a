import pytest

from trainer.model.gpu_peaks import PEAKS, peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "bf16_tflops_per_s"),
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
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
    ],
)
def test_finds_device_by_words_of_its_name(name, bf16_tflops_per_s):
    assert peak_flops_per_s(name, "bf16") == bf16_tflops_per_s * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA A10G",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce GTX 1080",
        "NVIDIA A100X-unknown",
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
