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
        ("NVIDIA B200", 2250),
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
        assert peak.bf16 > peak.tf32 > peak.fp32
