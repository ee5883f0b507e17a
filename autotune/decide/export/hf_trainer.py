"""A profile as ``TrainingArguments`` of transformers' Trainer. Pure: groups of settings, each with its translation.

Names and meanings are those of transformers 5.23; a test makes real arguments of what is written here.
"""

from autotune.core.export import Equivalent
from autotune.decide.export.hf_absent import ABSENT
from autotune.decide.export.hf_loading import collator, layout, loader, model, saves
from autotune.decide.export.hf_ranks import parallel
from autotune.decide.export.hf_recipe import optimizer, schedule, seed
from autotune.decide.export.subject import Rule, Subject
from autotune.decide.export.worth import worth_of

WRITTEN_FOR = "transformers 5.23"
_OUTPUT = "runs/hf-{}"


def _place(subject: Subject) -> list[Equivalent]:
    """Where the other trainer writes: its own choice of a directory would be the working directory's."""
    return [
        Equivalent(
            setting="run directory",
            argument="output_dir",
            value=_OUTPUT.format(subject.train.model.name),
            equivalence="near",
            remark="its own files: no run record, steps, events or exit.json as this trainer's",
        )
    ]


def _batch(subject: Subject) -> list[Equivalent]:
    batch, train = subject.batch, subject.train
    said = "" if not subject.is_packed else "a sample there takes the place of a packed row here"
    unlike = batch.samples_per_microbatch_per_rank != batch.rows_per_microbatch_per_rank or subject.is_packed
    exact = not subject.is_packed and batch.exported_samples_per_step == batch.rows_per_step
    return [
        Equivalent(
            setting="micro_batch_rows", ours=train.micro_batch_rows, argument="per_device_train_batch_size",
            value=batch.samples_per_microbatch_per_rank, equivalence="near" if unlike else "same", remark=said,
        ),
        Equivalent(
            setting="global_batch_rows", ours=batch.rows_per_step, argument="gradient_accumulation_steps",
            value=batch.accumulation_steps, equivalence="same" if exact else "near",
            remark=f"{batch.exported_samples_per_step:,} samples a step of all ranks"
            + ("" if exact else "; whole micro-batches of all ranks, where this trainer keeps the batch exactly"),
        ),
        *(_given_otherwise(name, value) for name, value in (
            ("global_batch_tokens", train.global_batch_tokens), ("global_batch_samples", train.global_batch_samples),
        )),
        Equivalent(
            setting="evaluation.max_rows", ours=train.evaluation.max_rows, argument="per_device_eval_batch_size",
            value=batch.samples_per_microbatch_per_rank, equivalence="near",
            remark="every row of its evaluation dataset; cut the dataset for fewer. Other masks each time",
        ),
    ]  # fmt: skip


def _given_otherwise(setting: str, value: int | None) -> Equivalent:
    return Equivalent(setting=setting, ours=value, remark="decides gradient_accumulation_steps, where it is given")


def _number_format(subject: Subject) -> list[Equivalent]:
    train = subject.train
    on_gpu = train.device == "cuda"
    products = on_gpu and train.precision == "fp32"
    return [
        Equivalent(setting="device", ours=train.device, argument="use_cpu", value=not on_gpu),
        Equivalent(
            setting="precision", ours=train.precision, argument="bf16", value=train.precision == "bf16",
            remark="autocast in both; weights and optimizer stay in fp32",
        ),
        Equivalent(
            setting="tf32", ours=train.tf32, argument="tf32", value=train.tf32 if products else None,
            remark="" if products else "concerns fp32 on GPUs alone",
        ),
    ]  # fmt: skip


def _compute(subject: Subject) -> list[Equivalent]:
    train = subject.train
    return [
        Equivalent(
            setting="compile_layers", ours=train.compile_layers, argument="torch_compile", value=train.compile_layers,
            equivalence="near" if train.compile_layers else "same",
            remark="compiles the whole model rather than each layer: longer at the start, and anew for other widths"
            if train.compile_layers else "",
            worth=worth_of(subject.profile, ["compile_layers"]) if train.compile_layers else (),
        ),
        _checkpointing(subject),
    ]  # fmt: skip


def _checkpointing(subject: Subject) -> Equivalent:
    chosen = subject.train.checkpointing
    if chosen == "none":
        return Equivalent(setting="checkpointing", ours=chosen, remark="its default")
    inside = subject.train.parallel.strategy == "fsdp2"
    where = "fsdp_config.activation_checkpointing" if inside else "gradient_checkpointing"
    return Equivalent(
        setting="checkpointing",
        ours=chosen,
        argument=None if inside else "gradient_checkpointing",
        value=None if inside else True,
        equivalence="same" if chosen == "full" else "near",
        remark=f"as {where}"
        + ("" if chosen == "full" else "; it computes whole layers again, where selective keeps matrix products"),
    )


RULES: tuple[Rule, ...] = (
    _place, model, _batch, layout, _number_format, loader, optimizer, schedule, seed, saves, _compute, parallel,
    collator, *ABSENT,
)  # fmt: skip
"""In the order in which they are shown."""
