"""What tests of plans share: what is asked for, and profiles of cards and without evidence."""

from pathlib import Path

from autotune.core.evidence import Evidence
from autotune.core.plan import Goal
from autotune.core.trial import GpuUse
from autotune.search.plan import PlanRequest
from autotune.search.prediction import settings_of_step
from autotune.search.profiles import StoredProfile
from tests.autotune.search.test_scaling import probed
from trainer.config import TrainConfig
from trainer.presets import model_settings

TOKENS = Goal(kind="tokens", amount=1e9, source="--tokens 1B")
ON_A_CARD = {"device": "cuda", "gpu_name": "NVIDIA H100 NVL", "gpu_total_bytes": 95_830 * 2**20, "gpu_count": 2}


def asked(source, **changes) -> PlanRequest:
    return PlanRequest(**{"source": source, "model_argument": "", "goal": TOKENS} | changes)


def stored(profile, path=Path("profiles/p.toml")) -> StoredProfile:
    return StoredProfile(path=path, profile=profile, intact=True)


def traced(**evidence):
    """A probed profile whose memory was traced."""
    profile = probed(**evidence)
    terms = {"parameters": 2_000_000, "gradients": 2_000_000, "optimizer": 4_000_000, "activations: Linear": 10**9}
    probe = profile.evidence.probe.model_copy(update={"traced_terms_bytes": terms})
    config = profile.train.model.config | {"num_attention_heads": 4}
    model = profile.train.model.model_copy(update={"config": config, "null_keys": []})
    return profile.model_copy(
        update={
            "train": profile.train.model_copy(update={"model": model}),
            "evidence": profile.evidence.model_copy(update={"probe": probe}),
        }
    )


def on_gpus(profile, power_w=None):
    """The same, measured on a card."""
    workers = profile.evidence.workers
    if power_w is not None:
        rows = [
            row.model_copy(update={"gpu": GpuUse(power_w=power_w + 100 * (row.loader_workers != workers.chosen))})
            for row in workers.rows
        ]
        workers = workers.model_copy(update={"rows": rows})
    return profile.model_copy(
        update={
            "fingerprint": profile.fingerprint.model_copy(update=ON_A_CARD),
            "constraints": profile.constraints.model_copy(update={"memory_budget_bytes": 94 * 10**9}),
            "train": profile.train.model_copy(update={"device": "cuda", "precision": "bf16"}),
            "evidence": profile.evidence.model_copy(update={"workers": workers}),
        }
    )


def without_evidence(profile):
    """Decided without a measurement."""
    return profile.model_copy(update={"evidence": Evidence()})


def shape(name="bert-mini") -> TrainConfig:
    return settings_of_step(model_settings(name), "cuda", layout=None, precision=None, seq_length_tokens=512)
