"""How ranks work together, as transformers' Trainer has it. Pure."""

import math

from autotune.core.export import Equivalent, Scalar
from autotune.decide.export.subject import Subject
from autotune.decide.export.worth import gradients_twice, whole_optimizer, worth_of_exchange

TORCHS_BUCKET_CAP_MIB = 25
"""Where nobody names a size torch makes the first bucket smaller, so that something travels early."""


def parallel(subject: Subject) -> list[Equivalent]:
    """Strategy, buckets, what gradients travel as."""
    settings = subject.train.parallel
    rows = _fsdp(subject) if settings.strategy == "fsdp2" else _ddp(subject)
    return [
        *rows,
        _gradient_dtype(subject),
        Equivalent(
            setting="parallel.timeout_s", ours=settings.timeout_s, argument="ddp_timeout",
            value=math.ceil(settings.timeout_s), equivalence="near",
            remark="a collective that waits so long kills its process; this trainer leaves, and says where ranks were",
        ),
    ]  # fmt: skip


def _ddp(subject: Subject) -> list[Equivalent]:
    settings = subject.train.parallel
    default = settings.bucket_cap_mib == TORCHS_BUCKET_CAP_MIB
    return [
        _strategy(subject),
        Equivalent(setting="parallel.shard_ranks", ours=settings.shard_ranks, remark="of fsdp2 alone"),
        Equivalent(
            setting="parallel.bucket_cap_mib", ours=settings.bucket_cap_mib, argument="ddp_bucket_cap_mb",
            value=None if default else settings.bucket_cap_mib,
            remark="torch's default; naming it would make the first bucket larger" if default else "MiB as well",
        ),
        _bucket_view(subject),
        Equivalent(
            setting="parallel.static_graph", ours=settings.static_graph, argument="ddp_static_graph",
            value=True if settings.static_graph else None,
        ),
        Equivalent(
            setting="every parameter is used", argument="ddp_find_unused_parameters", value=False,
            remark="otherwise it looks for unused ones in every step",
        ),
        Equivalent(setting="no buffers travel", argument="ddp_broadcast_buffers", value=False),
    ]  # fmt: skip


def _bucket_view(subject: Subject) -> Equivalent:
    chosen, key = subject.train.parallel.gradient_as_bucket_view, "parallel.gradient_as_bucket_view"
    if not chosen or subject.ranks == 1:
        return Equivalent(setting=key, ours=chosen, remark="concerns several ranks" if chosen else "its default")
    return Equivalent(
        setting=key,
        ours=chosen,
        equivalence="none",
        remark="gradients exist twice, in DDP's buckets and outside of them",
        worth=gradients_twice(subject.profile),
    )


def _strategy(subject: Subject) -> Equivalent:
    if subject.train.parallel.strategy == "ddp":
        return Equivalent(setting="parallel.strategy", ours="ddp", remark="its default under torchrun")
    return Equivalent(
        setting="parallel.strategy",
        ours="zero1",
        equivalence="none",
        remark="plain DDP instead: every rank holds the whole optimizer. DeepSpeed's stage 1 shares it out as well, by "
        "an engine of its own",
        worth=(*whole_optimizer(subject.profile, subject.ranks), *worth_of_exchange(subject.profile)),
    )


def _fsdp(subject: Subject) -> list[Equivalent]:
    settings, train = subject.train.parallel, subject.train
    config: dict[str, Scalar] = {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": train.checkpointing != "none",
    }
    casts = train.precision == "bf16"
    return [
        Equivalent(
            setting="parallel.strategy", ours="fsdp2", argument="fsdp", value=True,
            equivalence="near" if casts else "same",
            remark="with bf16 it gathers weights and sends gradients in bf16, a change of recipe" if casts else "",
        ),
        Equivalent(
            setting="layers that are gathered one at a time", argument="fsdp_config", value=config, equivalence="near",
            remark="the model's own list of layers; its embeddings and head are gathered with the whole, as here",
        ),
        Equivalent(
            setting="parallel.shard_ranks", ours=settings.shard_ranks,
            equivalence="same" if settings.shard_ranks is None else "none",
            remark="all ranks share one copy" if settings.shard_ranks is None
            else "HSDP: its JSON cannot say it, so all ranks share one copy and weights travel between nodes",
        ),
        *(Equivalent(setting=f"parallel.{name}", ours=getattr(settings, name), remark="DDP's; fsdp2 has none")
          for name in ("bucket_cap_mib", "gradient_as_bucket_view", "static_graph")),
    ]  # fmt: skip


def _gradient_dtype(subject: Subject) -> Equivalent:
    settings, train = subject.train.parallel, subject.train
    chosen, key = settings.gradient_dtype, "parallel.gradient_dtype"
    if settings.strategy == "fsdp2" and train.precision == "bf16":
        if chosen == "bf16":
            return Equivalent(setting=key, ours=chosen, equivalence="near", remark="follows from bf16 there")
        return Equivalent(
            setting=key, ours=chosen, equivalence="none", remark="gradients travel in bf16 there, as bf16 is on"
        )
    if chosen == "fp32":
        return Equivalent(setting=key, ours=chosen, remark="its default")
    return Equivalent(
        setting=key,
        ours=chosen,
        equivalence="none",
        remark="gradients travel in fp32: twice the bytes. A DDP communication hook can only be set in code",
        worth=worth_of_exchange(subject.profile),
    )
