"""Profiles for plans: with traced memory, of GPUs, and without evidence."""

from autotune.evidence.profile import Evidence
from testbed.examples.profiles import but
from tests.autotune.subjects.mlm.network.test_scaling import probed

ON_A_GPU = {
    "device": "cuda",
    "gpu_name": "NVIDIA H100 NVL",
    "gpu_total_bytes": 95_830 * 2**20,
    "gpu_count": 2,
}


def traced(**evidence):
    profile = probed(**evidence)
    terms = {
        "parameters": 2_000_000,
        "gradients": 2_000_000,
        "optimizer": 4_000_000,
        "activations: Linear": 10**9,
    }
    probe = profile.evidence.probe.model_copy(update={"traced_terms_bytes": terms})
    config = profile.train.model.config | {"num_attention_heads": 4}
    model = profile.train.model.model_copy(update={"config": config, "null_keys": []})
    # Compiled layers take longer to trace.
    return but(
        profile, train={"model": model, "compile": False}, evidence={"probe": probe}
    )


def on_gpus(profile):
    settings = {"device": "cuda", "precision": "bf16"}
    return but(
        profile,
        fingerprint=ON_A_GPU,
        constraints={"memory_budget_bytes": 94 * 10**9},
        train=settings,
    )


def without_evidence(profile):
    return profile.model_copy(update={"evidence": Evidence()})
