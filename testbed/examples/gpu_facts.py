"""GPUs as their driver reports them, for tests."""

from trainer.formats.gpus import GpuFacts

H200 = GpuFacts(
    uuid="GPU-1",
    index=0,
    name="NVIDIA H200",
    total_bytes=143_771 * 2**20,
    mig_enabled=False,
    power_cap_w=700.0,
    compute_mode="default",
    driver="580.1",
    compute_capability=(9, 0),
)
"""An H200 at its default power limit."""
