"""The search phase of a tuning.

It searches a step's settings jointly, probes the best, and writes them into the
profile.
"""

import contextlib
import math
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, get_args

from autotune.base.files import write_atomically
from autotune.base.model_config import attention_dropout
from autotune.errors import ExceedsMemory, OutOfTime
from autotune.evidence.explore import Configuration, ExploreEvidence
from autotune.evidence.profile import Profile
from autotune.memory.estimate import CannotTrace
from autotune.memory.probe import ProbeRequest
from autotune.memory.stage import prepare, profile_of_probe, settled_probe
from autotune.profiles.decide.batch_split import (
    global_batch_size_of,
    split_global_batch,
)
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile, before_sweep
from autotune.profiles.toml_file import profile_to_toml
from autotune.search.decide import knob_space, with_split_batch
from autotune.search.history import ExploreRequest
from autotune.search.measure import (
    ConfirmedChoice,
    Exploration,
    confirm,
    confirm_one_of,
    evidence,
)
from autotune.speed.decide import predict_steps_s
from autotune.speed.measure import known_rates
from autotune.trials.session import Session
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.windows import training_windows
from trainer.config.compilers import missing_for_compile, missing_for_triton
from trainer.config.packages import has_flash_attention_4
from trainer.config.train_config import (
    TRIMMED_LAYOUTS,
    Checkpointing,
    CompileMode,
    Float8,
    TrainConfig,
)
from trainer.data.dataset import TokenDataset
from trainer.data.sequence_statistics import sequence_statistics
from trainer.model.families import FAMILIES

COMPILER_OPTIONS = ("compile_mode", "mix_order_reduction", "combo_kernels")
"""Settings that only compiled layers on a GPU have."""


def explore_settings(
    bench: Session,
    stored: StoredProfile,
    probe_request: ProbeRequest,
    request: SweepRequest,
) -> ExploreEvidence:
    """Search the settings of a step, and write the result.

    Settings that are verified to be faster are probed and adopted. Settings that you
    fixed in the ``probe_request`` are not searched.

    Raises:
        ProfileRejected: If the profile does not match the machine, model or dataset.
        Undecided: If the starting configuration could not be measured.
    """
    require_local_probe(stored, bench.fingerprint(stored.profile.train.model))
    space = explore_request(bench, stored, probe_request, request)
    with bench.phase(
        "explore", stored.path, stored.profile.train.model, request, 40
    ) as runner:
        search = Exploration(request=space, runner=runner)
        search.run()
        explored = confirm(search)
    profile, explored = _settle(bench, stored, probe_request, search, explored)
    found = evidence(search, explored)
    write_atomically(
        stored.path, profile_to_toml(add_evidence(profile, "explore", found, runner))
    )
    return found


def _settle(
    bench: Session,
    stored: StoredProfile,
    probe_request: ProbeRequest,
    search: Exploration,
    explored: ConfirmedChoice,
) -> tuple[Profile, ConfirmedChoice]:
    """Probe the settings to adopt.

    If only a smaller micro-batch leaves the headroom free, its speed is verified as
    well.
    """
    if not explored.adopted:
        return stored.profile, explored
    chosen, train, ends_s = (
        explored.candidate,
        stored.profile.train,
        search.runner.budget_ends_s,
    )
    tokens = stored.profile.constraints.global_batch_tokens
    settings = {
        **chosen.model_dump(),
        "parallel": train.parallel,
        "global_batch_tokens": tokens,
    }
    again = replace(
        probe_request, config=probe_request.config.model_copy(update=settings)
    )
    try:
        probed, _ = profile_of_probe(
            bench, prepare(bench, again), stored.path, budget_ends_s=ends_s
        )
    except (ExceedsMemory, OutOfTime) as error:
        return stored.profile, replace(explored, adopted=False, rejected=error.message)
    probe = probed.evidence.probe
    assert probe is not None
    most = with_headroom(probe.feasible_max, probed.constraints.headroom_share)
    if chosen.micro_batch_size > most:
        ranks = search.request.training.limits.local_ranks
        fewer = with_split_batch(
            chosen.but(micro_batch_size=most), search.request.global_batch_size, ranks
        )
        if fewer == search.starting:
            why = (
                f"only micro-batch size {most} leaves the headroom free, which is the"
                " starting configuration"
            )
            return stored.profile, replace(explored, adopted=False, rejected=why)
        search.known.keep(dict.fromkeys((*search.known.cells, fewer)))
        proven = confirm_one_of([fewer], search)
        told = proven.equal_loss or explored.equal_loss
        explored = replace(proven, equal_loss=told, passed_over=explored.passed_over)
    if not explored.adopted:
        return stored.profile, explored
    probe = probe.model_copy(
        update={"choice": "found by the joint search of the step's settings"}
    )
    taken = probed.with_train(
        probed.train.model_copy(
            update={"micro_batch_size": explored.candidate.micro_batch_size}
        )
    )
    evidence = probed.evidence.model_copy(update={"probe": probe})
    return taken.model_copy(update={"evidence": evidence}), explored


def explore_request(
    bench: Session,
    stored: StoredProfile,
    probe_request: ProbeRequest,
    request: SweepRequest,
) -> ExploreRequest:
    """Return the search space around a profile's settings, with its windows.

    Arguments are as for ``explore_settings``.
    """
    train, constraints = before_sweep(stored.profile), stored.profile.constraints
    probe = settled_probe(bench, probe_request)
    levels, left_out = _levels(bench, train, probe_request.config)
    with contextlib.closing(TokenDataset.open(request.data)) as dataset:
        layouts = [
            train.model_copy(update={"layout": layout}) for layout in levels["layout"]
        ]
        rows = {one.layout: sequence_statistics(one, dataset) for one in layouts}
    tokens, width = stored.profile.global_batch_tokens, train.seq_length_tokens
    means = {layout: one.mean_non_padding_tokens for layout, one in rows.items()}
    global_batch_size = {
        layout: global_batch_size_of(tokens, mean) for layout, mean in means.items()
    }
    ranks, max_micro_batch_size = probe.local_ranks, probe_request.max_micro_batch_size
    limits = {
        "memory_budget_bytes": probe.memory_budget_bytes,
        "headroom_share": constraints.headroom_share,
    }
    limits |= {"ranks": ranks, "micro_batches": probe.micro_batches}
    cells = knob_space(
        Configuration.of(train),
        levels,
        global_batch_size,
        ranks,
        lambda _: max_micro_batch_size,
    )
    rates = known_rates(
        bench.site.host.cpu_model or "cpu"
        if bench.site.gpu is None
        else bench.site.gpu.name
    )

    def predict(kind: Configuration) -> dict[str, Any]:
        """Predict the largest micro-batch, and seconds of steps by size.

        The micro-batch leaves the headroom free.
        """
        rows_of_all, config = (
            global_batch_size[kind.layout],
            probe.config.model_copy(update=kind.model_dump()),
        )
        useful = math.ceil(rows_of_all / ranks / (1 - constraints.headroom_share)) + 1
        asked = replace(
            probe_request, max_micro_batch_size=min(useful, max_micro_batch_size)
        )
        try:
            found = replace(
                probe,
                request=asked,
                sequence_stats=rows[kind.layout],
                config=config,
            ).trace(bench.machine)
        except CannotTrace:
            return {"max": None}
        most = with_headroom(found.max_micro_batch_size, constraints.headroom_share)
        if rates is None or kind.precision not in rates.matmul:
            return {"max": most}
        # Trimmed layouts leave out most of the padding, which is traced.
        share = means[kind.layout] / width if kind.layout in TRIMMED_LAYOUTS else 1.0
        sizes = [
            cell.micro_batch_size
            for cell in cells
            if cell.kind == kind and cell.micro_batch_size <= most
        ]
        counts = [
            split_global_batch(rows_of_all, size, ranks).gradient_accumulation_steps
            for size in sizes
        ]
        seconds = predict_steps_s(
            found.works, rates, config, sizes, [share * count for count in counts]
        )
        return {"max": most, "step_s": dict(zip(sizes, seconds, strict=True))}

    return ExploreRequest(
        training=training_windows(bench, train, request, ranks),
        cells=cells,
        global_batch_size=global_batch_size,
        non_padding_shares={
            one: None if one == "bucketed" else mean / width
            for one, mean in means.items()
        },
        left_out=tuple(left_out),
        predict=None if probe.overheads is None else predict,
        predicted_for=limits if rates is None else limits | {"rates": rates.source},
    )


def _levels(
    bench: Session, train: TrainConfig, asked: TrainConfig
) -> tuple[dict[str, tuple[Any, ...]], list[str]]:
    """Return the values of each setting, the profile's first.

    The reasons for values that are left out are returned as well.
    """
    levels: dict[str, tuple[Any, ...]] = {
        "precision": ("fp32", "bf16"),
        "attention": ("auto", "sdpa"),
        "activation_checkpointing": get_args(Checkpointing),
        "compile": (False, True),
        "compile_mode": get_args(CompileMode),
        "mix_order_reduction": (False, True),
        "combo_kernels": (True, False),
        "fused_norms": (False, True),
        "gelu_epilogues": (False, True),
        "float8": get_args(Float8),
        "fused_cross_entropy": (False, True),
        "layout": ("packed", "bucketed", "padded"),
    }
    left_out = []

    def leave_out(name: str, why: str, *values: object) -> None:
        levels[name] = values
        left_out.append(f"{name}: {why}")

    for name in (
        "precision",
        "layout",
        "compile_mode",
        "mix_order_reduction",
        "combo_kernels",
        "fused_norms",
        "gelu_epilogues",
        "float8",
        "fused_cross_entropy",
    ):
        if name in asked.model_fields_set:
            leave_out(name, f"you set {str(getattr(train, name)).lower()}")
    model_type = train.model.config["model_type"]
    if levels["layout"] and model_type not in FAMILIES:
        leave_out("layout", f"{model_type} cannot be packed", "padded", "bucketed")
    if (missing := missing_for_compile(bench.site.device)) is not None:
        leave_out("compile", missing)
    gpu = bench.site.gpu
    capability = (gpu and gpu.compute_capability) or (0, 0)
    if bench.site.device == "cpu":
        leave_out("attention", "varlen requires a GPU")
    elif (
        attention_dropout(train) == 0 and capability[0] == 9 and has_flash_attention_4()
    ):
        levels["attention"] += ("fa4",)
    if gpu is None or train.parallel.strategy == "fsdp2" or model_type not in FAMILIES:
        levels |= {"float8": (), "fused_cross_entropy": ()}
    if capability < (8, 9) or not levels["compile"]:
        levels["float8"] = ()
    if gpu is None or not levels["compile"]:
        levels |= dict.fromkeys(COMPILER_OPTIONS, ())
    levels |= dict.fromkeys(_unusable_kernels(train, on_gpu=gpu is not None), ())
    if levels["float8"] and find_spec("torchao") is None:
        leave_out("float8", "torchao is not installed (pip install '.[fp8]')")
    if train.mlm_head != "sparse" or find_spec("liger_kernel") is None:
        levels["fused_cross_entropy"] = ()
    first = {name: getattr(train, name) for name in levels} | {
        "compile": train.compiled
    }
    first |= {"attention": "auto"} if levels["attention"] else {}
    return {
        name: tuple(dict.fromkeys((first[name], *values)))
        for name, values in levels.items()
    }, left_out


def _unusable_kernels(train: TrainConfig, *, on_gpu: bool) -> tuple[str, ...]:
    """Return the settings whose Triton kernels cannot compute this model here."""
    model = train.model.config
    if (
        not on_gpu
        or train.parallel.strategy == "fsdp2"
        or FAMILIES.get(model["model_type"]) != "bert"
        or missing_for_triton() is not None
    ):
        return ("fused_norms", "gelu_epilogues")
    return () if model.get("hidden_act", "gelu") == "gelu" else ("gelu_epilogues",)
