import pytest

from trainer.peaks import PEAKS, peak_flops_per_s


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
def test_a_device_is_known_by_the_words_of_its_name(name, tera):
    found = peak_flops_per_s(name, "bf16")
    assert found == (None if tera is None else tera * 1e12)


def test_every_peak_has_its_source_and_falls_from_bf16_to_fp32():
    for peak in PEAKS:
        assert peak.source
        assert peak.bf16 > peak.tf32 >= peak.fp32
