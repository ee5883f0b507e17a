"""A made-up tuning on GPUs with every kind of evidence, for judging reports: no figure
in it was measured.

Every text that a report takes from files ends in ``note``, so that a hostile one is
everywhere at once.
"""

import math
from pathlib import Path

from autotune.base.interval import Interval
from autotune.evidence.advice import (
    Advice,
    Bottleneck,
    EvidenceFigure,
    Gain,
    SettingChange,
    StepPart,
)
from autotune.evidence.baseline import (
    BaselineEvidence,
    BaselineRow,
    SettingDifference,
)
from autotune.evidence.explore import (
    ExploredConfiguration,
    ExploredRow,
    ExploreEvidence,
)
from autotune.evidence.gpu_use import GpuUse
from autotune.evidence.network import (
    ComputeEvidence,
    GradientSyncRow,
    LinkEvidence,
    NetworkEvidence,
    ScalingRow,
)
from autotune.evidence.probe import CurvePoint, ProbeEvidence
from autotune.evidence.profile import (
    Constraints,
    Evidence,
    Fingerprint,
    Profile,
    Provenance,
    trainer_subject,
)
from autotune.evidence.workers import WorkersEvidence, WorkersRow
from autotune.profiles.approval_record import Approval, ApprovalRecord
from autotune.profiles.reported_profile import ReportedProfile
from autotune.report.values import ReportedRun
from autotune.subjects.mlm.settings import choice_words
from autotune.trials.outcomes import Measured, Outcome, OutOfMemory
from autotune.trials.values import FinishedTrial, Trial
from testbed.examples.checkpoints import exit_of, header_of
from testbed.examples.run_rows import evaluation_of, row_of, startup_of
from trainer.formats.events import EventRow
from trainer.formats.manifest import (
    LengthHistogram,
    Manifest,
    Shard,
    SourceStatistics,
    SpecialIds,
    Split,
)
from trainer.formats.run_record import Run, StepRow
from trainer.formats.train_config import (
    DataSettings,
    ModelSettings,
    ParallelSettings,
    TrainConfig,
)

GIB = 2**30
ROW_TOKENS, FILL = 512, 0.994
RANKS, PER_RANK_TOKENS = 2, 171_000.0
PEAK_FLOPS = 835e12


def example_profile(dataset_hash: str, note: str = "") -> Profile:
    train = TrainConfig(
        model=ModelSettings(name="bert-120m", config={"model_type": "bert"}),
        data=DataSettings(path="data", dataset_hash=dataset_hash, num_workers=3),
        parallel=ParallelSettings(bucket_cap_mib=100, gradient_dtype="bf16"),
        seq_length_tokens=ROW_TOKENS,
        layout="packed",
        micro_batch_size=64,
        global_batch_size=2048,
        attention_dropout=0.0,
        precision="bf16",
        device="cuda",
    )
    return Profile(
        subject=trainer_subject(train),
        train=train,
        constraints=Constraints(
            memory_budget_bytes=93 * GIB, headroom_share=0.03, global_batch_tokens=2**20
        ),
        fingerprint=Fingerprint(
            device="cuda",
            gpu_name=f"NVIDIA H100 NVL{note}",
            gpu_count=2,
            gpu_total_bytes=95_830 * 2**20,
            gpu_mig=False,
            gpu_power_cap_w=400.0,
            driver="580.82.07",
            cuda="13.0",
            torch=f"2.13.0+cu130{note}",
            transformers=f"5.23.0{note}",
            python="3.11.7",
            cpu_model=f"AMD EPYC 9254 24-Core Processor{note}",
            allotted_cpus=48,
            ram_total_bytes=768 * GIB,
            data_filesystem=f"lustre{note}",
            model_sha256="5e" * 32,
            dataset_hash=dataset_hash,
        ),
        provenance=Provenance(
            tool_version="0.1.0",
            created_utc="2026-11-22T03:48:08Z",
            slurm_job_id="4711",
            commands=["probe", "explore", "workers", "network", "baseline"],
            trial_log_sha256="b4" * 32,
        ),
        evidence=Evidence(
            probe=_probe(note),
            explore=_explore(note),
            workers=_workers(note),
            network=_network(note),
            baseline=_baseline(note),
        ),
    )


def _probe(note: str) -> ProbeEvidence:
    curve = [_point(rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 298)]
    terms = {
        "parameters": 0.45,
        "gradients": 0.45,
        "optimizer": 0.9,
        "activations: BertSelfAttention": 21.0,
        "activations: Linear": 18.5,
        "activations: GELUActivation": 18.1,
        "activations: LayerNorm": 11.4,
        "activations: Dropout": 9.6,
        "head and loss": 4.2,
        "temporaries": 3.4,
        "inputs and masks": 0.02,
        "non-PyTorch memory": 1.1,
        f"rounding and fragmentation{note}": 1.3,
    }
    return ProbeEvidence(
        feasible_max=307,
        infeasible_min=308,
        feasible_peak_bytes=round(92.1 * GIB),
        predicted_peak_bytes=round(92.4 * GIB),
        traced_peak_bytes=round(90.4 * GIB),
        traced_micro_batch_size=312,
        traced_terms_bytes={name: round(size * GIB) for name, size in terms.items()},
        parameters=119_547_648,
        local_ranks=RANKS,
        gradient_accumulation_steps=2,
        search_trials=3,
        seconds=212.4,
        mean_tokens_per_sequence=FILL * ROW_TOKENS,
        curve=curve,
        knee_micro_batch_sizes=[32, 128],
        choice=(
            "it has 99.1% of the best tokens/s (128 rows); smaller ones are under"
            f" 98%{note}"
        ),
    )


def _explore(note: str) -> ExploreEvidence:
    starting = _explored()
    compiled = _explored(compile=True)
    tried = (
        (starting, None, 18, "ran"),
        (compiled, 1.012, 9, "ran"),
        (_explored(layout="bucketed"), 0.91, 2, "ran"),
        (_explored(activation_checkpointing="full"), 0.72, 1, "pruned"),
        (_explored(compile=True, attention="sdpa"), None, 0, f"crashed{note}"),
    )
    rows = [
        ExploredRow(
            name=configuration.name,
            settings=configuration.settings,
            windows=windows,
            ratio_to_starting=ratio,
            outcome=outcome,
            tokens_per_s=None if not windows else 2 * PER_RANK_TOKENS * (ratio or 1.0),
        )
        for configuration, ratio, windows, outcome in tried
    ]
    return ExploreEvidence(
        configurations=108,
        trials=4,
        windows=30,
        pruned=1,
        starting=starting,
        chosen=starting,
        candidate=compiled,
        ratio_to_starting=1.012,
        ratio_low=0.994,
        ratio_high=1.031,
        adopted=False,
        choice=f"{compiled.name} was not verified to be faster{note}",
        stopped_because=(
            f"the largest expected improvement, 0.2%, is below the noise{note}"
        ),
        equal_loss=f"not checked{note}",
        left_out=[f"precision: you set bf16{note}"],
        rows=rows,
        seconds=412.5,
    )


def _explored(**changes: object) -> ExploredConfiguration:
    """Return a configuration of the search."""
    choice = {
        "precision": "bf16",
        "attention": "auto",
        "activation_checkpointing": "none",
        "compile": False,
        "layout": "packed",
        "micro_batch_size": 64,
    }
    choice |= changes
    return ExploredConfiguration(name=choice_words(choice), settings=choice)


def _point(rows: int) -> CurvePoint:
    speed = 2 * PER_RANK_TOKENS * rows / (rows + 2.6) / FILL
    return CurvePoint(
        size=rows,
        units_per_s=speed,
        step_s=RANKS * rows * ROW_TOKENS / speed,
        timed_steps=8,
        units_per_s_low=speed * (1 - 0.06 / math.sqrt(rows)),
        units_per_s_high=speed * 1.012,
    )


def _workers(note: str) -> WorkersEvidence:
    ceiling = 2 * PER_RANK_TOKENS / FILL
    rows = [
        WorkersRow(
            num_workers=count,
            units_per_s=[ratio * ceiling * scale for scale in (0.99, 1.0, 1.006)],
            ratio_to_cached=ratio,
            ratio_low=ratio - 0.012,
            ratio_high=ratio + 0.01,
            verdict="verified" if ratio > 0.99 else "refuted",
            data_wait_share=max(0.002, 1 - ratio - 0.003),
            memory_bytes=(3 + 2 * count) * GIB,
            storage_bytes_per_s=3.1e6,
            gpu=GpuUse(
                utilisation_share=min(0.99, 0.3 + 0.7 * ratio),
                power_w=180 + 210 * ratio,
                sm_clock_mhz=1755.0,
                power_capped_share=max(0.0, ratio - 0.6),
                gpm_sm_share=0.86 * ratio,
                gpm_occupancy_share=0.31 * ratio,
                gpm_tensor_share=0.44 * ratio,
                gpm_dram_share=0.52 * ratio,
                gpm_pcie_rx_bytes_per_s=9e6,
            ),
        )
        for count, ratio in {
            0: 0.41,
            1: 0.62,
            2: 0.93,
            3: 0.995,
            4: 0.997,
            8: 0.991,
        }.items()
    ]
    return WorkersEvidence(
        chosen=3,
        choice=f"the fewest whose lower bound is at least 98% of the ceiling{note}",
        next_smaller=f"2 lose 5.8% to 8.2%{note}",
        keeps_up=True,
        unit="tokens",
        counts_padding=True,
        cached_units_per_s=[ceiling, ceiling * 1.004],
        rows=rows,
        local_ranks=RANKS,
        max_workers=24,
        max_workers_because=f"48 allotted CPUs, 2 local ranks{note}",
        consumer=f"the training step{note}",
        window_s=2.0,
        windows=31,
        seconds=164.0,
        data_filesystem=f"lustre{note}",
        data_on_network=True,
        gpu_source=f"NVML and GPM{note}",
        operating_state=f"398 W of 400 W, 1,755 MHz{note}",
    )


def _network(note: str) -> NetworkEvidence:
    links = [
        LinkEvidence(
            scope="within nodes",
            members=2,
            latency_s=9e-6,
            latency_s_low=8e-6,
            latency_s_high=1.1e-5,
            bytes_per_s=245e9,
            bytes_per_s_low=238e9,
            bytes_per_s_high=251e9,
            worst_error_share=0.04,
        ),
        LinkEvidence(
            scope="between nodes",
            members=2,
            latency_s=2.4e-5,
            bytes_per_s=2.71e9,
            worst_error_share=0.06,
        ),
    ]
    gradient_syncs = [
        GradientSyncRow(
            strategy="ddp",
            gradient_dtype=dtype,
            bucket_cap_mib=cap,
            gradient_accumulation_steps=4,
            micro_batch_size=64,
            predicted_step_s=s[0],
            step_s=s[1],
            steps=12,
            tokens_per_s=speed,
            compute_share=0.99 - s[2],
            communication_share=s[2],
            peak_bytes=24 * GIB,
            outcome=f"{outcome}{note}",
        )
        for dtype, cap, s, speed, outcome in (
            ("fp32", 25, (1.82, 1.86, 0.16), 560_000.0, "the default"),
            ("bf16", 100, (1.61, 1.63, 0.05), 642_000.0, "chosen"),
        )
    ]
    scaling = [_scaling(2**power, measured=False, note=note) for power in range(8)]
    scaling += [_scaling(nodes, measured=True, note=note) for nodes in (1, 2)]
    return NetworkEvidence(
        nodes=2,
        ranks_per_node=RANKS,
        backend="nccl",
        interface=f"eth0{note}",
        interface_bytes_per_s=3_125_000_000,
        transport=f"NET/Socket{note}",
        links=links,
        all_reduce_factor=1.07,
        matmul_flops_per_s=[6.4e14] * 3 + [6.1e14],
        warnings=[f"rank 3 multiplies 4% slower than the others{note}"],
        default_micro_batch_size=64,
        compute=ComputeEvidence(
            micro_batch_size=64,
            micro_batch_s=0.19,
            fixed_s=0.004,
            optimizer_step_s=0.006,
            forward_share=0.34,
            jitter_share=0.007,
            slowdown_share=0.04,
            gradient_elements=[30_000_000, 89_547_648],
            gradient_ready_shares=[0.2, 1.0],
        ),
        gradient_syncs=gradient_syncs,
        scaling=scaling,
        useful_nodes=16,
        levers=[f"a global batch of 2 Mi tokens{note}"],
        choice=f"bf16 gradients win 14.6% (13.1% to 16.0%){note}",
        equal_loss=f"within 0.1 sigma over 200 steps{note}",
        windows=44,
        seconds=655.0,
    )


def _scaling(nodes: int, *, measured: bool, note: str) -> ScalingRow:
    efficiency = (
        1 / (1 + 0.0065 * (nodes - 1)) * (0.985 if measured and nodes > 1 else 1.0)
    )
    return ScalingRow(
        nodes=nodes,
        strategy="ddp",
        gradient_dtype="bf16",
        bucket_cap_mib=100,
        micro_batch_size=64,
        gradient_accumulation_steps=max(1, 16 // nodes),
        step_s=3.06 / nodes / efficiency,
        tokens_per_s=2 * PER_RANK_TOKENS * nodes * efficiency,
        efficiency=efficiency,
        efficiency_low=max(0.0, efficiency - 0.008 * math.log2(2 * nodes)),
        efficiency_high=min(1.0, efficiency + 0.006),
        limit=f"the network{note}",
        limit_share=1 - efficiency,
        measured=measured,
    )


def _baseline(note: str) -> BaselineEvidence:
    speeds = {"paper": 0.064, "untuned": 0.34, "tuned": 1.0}
    different = {
        "paper": [("precision", f"fp32{note}", "bf16"), ("layout", "padded", "packed")],
        "untuned": [("micro_batch_size", 8, 64), ("data.num_workers", 0, 3)],
        "tuned": [],
    }
    rows = [
        BaselineRow(
            name=name,
            subject="mlm: bert-mini",
            differences=[
                SettingDifference(key=key, theirs=a, tuned=b)
                for key, a, b in different[name]
            ],
            units_per_s=[
                2 * PER_RANK_TOKENS * 0.995 * share * scale
                for scale in (0.994, 1.0, 1.003, 0.998)
            ],
            speedup=1 / share,
            speedup_low=0.988 / share,
            speedup_high=1.015 / share,
            data_wait_share=0.003,
            outcome=f"ran{note}",
        )
        for name, share in speeds.items()
    ]
    return BaselineEvidence(
        rows=rows,
        unit="tokens",
        local_ranks=RANKS,
        window_s=5.0,
        windows=4,
        seconds=96.0,
    )


def example_manifest(note: str = "") -> Manifest:
    """Functions of programs: many short ones, few long ones."""
    edges = [*range(0, 1024, 8), *(2**power for power in range(10, 21))]
    counts = [
        round(
            4e6 * math.exp(-((math.log(edge + 4) - 4.9) ** 2) / 2.9) / (1 + edge / 90)
        )
        for edge in edges
    ]
    samples = sum(counts)
    shard = Shard(
        tokens_file="train-tokens-00000.npy",
        offsets_file="train-offsets-00000.npy",
        samples=samples,
        tokens=round(samples * 224.5),
        tokens_sha256="0" * 64,
        offsets_sha256="0" * 64,
    )
    empty = LengthHistogram(edges=edges, counts=[0] * len(edges))
    source = SourceStatistics(
        kinds=[f"elf{note}"],
        files=61_500,
        rejected=12,
        duplicate_samples=412_000,
        empty_samples=3,
        truncated_samples=0,
        split_samples=1200,
        raw_bytes=2 * 10**12,
        token_bytes=25 * 10**9,
        unknown_tokens=4000,
    )
    return Manifest(
        schema_version=2,
        dtype="uint16",
        vocab_size=16_384,
        used_vocab_size=16_380,
        special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
        tokenizer_sha256="1" * 64,
        train=Split(
            shards=[shard], length_histogram=LengthHistogram(edges=edges, counts=counts)
        ),
        validation=Split(shards=[], length_histogram=empty),
        source=source,
    )


def example_trials(count: int, note: str = "") -> tuple[FinishedTrial, ...]:
    """Steps of all sizes, some of which are refused, and windows of the worker
    sweep."""
    return tuple(_trial(number, note) for number in range(count))


def _trial(number: int, note: str) -> FinishedTrial:
    rows = 1 + number % 320
    measured = {
        "arguments": {"config": {"micro_batch_size": rows}},
        "local_ranks": RANKS,
        "attempt": number,
    }
    outcome: Outcome = Measured(
        figures={
            "steps": 5,
            "optimizer_steps": 5,
            "step_s": [0.01 * rows, 0.0101 * rows],
            "units_per_step": RANKS * rows * 512.0,
            "peak_bytes": (2 + rows * 0.29) * GIB // 1,
            "non_pytorch_bytes": GIB,
            "loss": 9.7,
            "local_ranks": RANKS,
            "peak_bytes_by_rank": [],
        }
    )
    if rows > 307:
        outcome = OutOfMemory(
            detail=f"CUDA out of memory. Tried to allocate {rows} MiB{note}"
        )
    return FinishedTrial(
        trial=Trial(job="step", measured=measured, timeout_s=600.0),
        outcome=outcome,
        seconds=3.2 + rows / 90,
        label=f"bert-120m: {rows} rows{note}",
        from_trial_log=True,
    )


def example_bottleneck(source: str, note: str = "") -> Bottleneck:
    """Mostly computing, and some of everything."""
    shares = {
        "compute": (0.862, 0.855, 0.868, f"compute_s{note}"),
        "network": (0.071, 0.066, 0.077, "communication_s"),
        "optimizer step": (0.031, 0.030, 0.032, "optimizer_s"),
        "launch-bound": (0.022, 0.015, 0.028, "what is left of step_s"),
        "data loading": (0.008, 0.006, 0.011, "data_wait_s"),
        "padding": (0.006, None, None, "packing_efficiency"),
    }
    parts = tuple(
        StepPart(cause=cause, share=share, low=low, high=high, source=source)  # type: ignore[arg-type]  # one of them
        for cause, (share, low, high, source) in shares.items()
    )
    return Bottleneck(
        limit="network",
        decided=True,
        parts=parts,
        steps=390,
        source=f"{source}{note}",
        mfu=Interval(value=0.351, low=0.348, high=0.354, confidence=0.95),
        untold=(
            (
                "how much of computing waits for the device's memory: GPM would"
                f" tell{note}"
            ),
        ),
    )


def example_advice(note: str = "") -> tuple[Advice, ...]:
    """One of each severity."""
    figure = EvidenceFigure(
        name=f"waiting for gradients{note}",
        value=0.071,
        unit="share",
        low=0.066,
        high=0.077,
        confidence=0.95,
        n=390,
        source=f"runs/20261122T034808Z{note}",
    )
    return (
        Advice(
            rule="thermal",
            severity="error",
            claim=f"GPU 1 slows down for heat in 31% of all samples{note}",
            evidence=(
                EvidenceFigure(
                    name="temperature",
                    value=88.0,
                    unit="°C",
                    n=1200,
                    source=f"NVML{note}",
                ),
            ),
            cost=f"the node is missing while it is repaired{note}",
            command="autotune doctor",
            would_change=f"a day without such samples{note}",
        ),
        Advice(
            rule="exposed-network",
            severity="warning",
            claim=f"7.1% of a step waits for gradients{note}",
            evidence=(
                figure,
                EvidenceFigure(
                    name="T_min",
                    value=234_000,
                    unit="tokens",
                    known="predicted",
                    source="formula",
                ),
            ),
            gain=Gain(
                of="throughput",
                ratio=1.052,
                low=1.041,
                high=1.066,
                known="predicted",
            ),
            cost="16-bit sums of gradients change the recipe",
            changes=(
                SettingChange(
                    key="parallel.gradient_dtype", old="fp32", new=f"bf16{note}"
                ),
            ),
            command="autotune network profiles/bert-120m-h100-nvl.toml --slurm",
            would_change="faster links, or a larger global batch",
            safe=True,
        ),
        Advice(
            rule="nothing",
            severity="info",
            claim="The loader needs no change",
            evidence=(),
            gain=None,
            cost="none",
            would_change="another file system",
        ),
    )


def example_run(
    directory: Path,
    profile_sha256: str,
    dataset_hash: str,
    note: str = "",
    steps: int = 400,
) -> Run:
    """A run whose loss falls, a little slower than was expected."""
    rows = tuple(_step(number) for number in range(1, steps + 1))
    events = tuple(
        EventRow(
            step=70 + number,
            utc="2026-11-22T04:00:00Z",
            kind="spike",
            level="warning",
            action="warn",
            message=f"the loss is 8.2 sigma above its median{note}",
            causes=[f"a batch of odd samples{note}"],
            next_step=f"look at the samples{note}",
        )
        for number in range(30)
    )
    header = header_of(
        name="bert-120m",
        job="4712",
        profile_sha256=profile_sha256,
        dataset_hash=dataset_hash,
        world_size=RANKS,
        gradient_accumulation_steps=16,
        global_batch_size=2048,
        parameters=119_547_648,
        attention=f"varlen{note}",
        attention_reason=f"bf16 on an H100{note}",
        recipe_changes=[f"attention dropout 0 instead of 0.1{note}"],
        device="cuda",
        peak_flops_per_s=PEAK_FLOPS,
        versions={"torch": f"2.13.0{note}"},
    )
    end = exit_of(reason=f"finished{note}", steps=steps, seconds=1250.0)
    told = {
        "evaluations": (evaluation_of(steps),),
        "events": events,
        "startup": startup_of(),
        "end": end,
    }
    return Run(directory=directory, header=header, steps=rows, **told)


def _step(number: int) -> StepRow:
    speed = (
        2
        * PER_RANK_TOKENS
        * 0.968
        * (1 + 0.004 * math.sin(1.7 * number))
        * (0.7 if number == 1 else 1.0)
    )
    real = round(2048 * ROW_TOKENS * FILL)
    step_s = real / speed
    return row_of(
        number,
        loss=2.1 + 7.6 * math.exp(-number / 60) + 0.05 * math.sin(number),
        step_s=step_s,
        data_wait_s=0.008 * step_s,
        compute_s=0.862 * step_s,
        communication_s=0.07 * step_s,
        optimizer_s=0.03 * step_s,
        non_padding_tokens=real,
        padded_tokens=2048 * ROW_TOKENS,
        packing_efficiency=FILL,
        tokens_per_s=speed,
        tokens_per_s_per_rank=speed / RANKS,
        padded_tokens_per_s=speed / FILL,
        padded_tokens_per_s_per_rank=speed / FILL / RANKS,
        model_flops_per_s_per_rank=0.344 * PEAK_FLOPS,
        mfu=0.344,
        mfu_6n=0.402,
        peak_memory_bytes=round(19.6 * GIB),
        gradient_noise_scale_tokens=4e5,
    )


def example_inputs(
    trials: int, note: str = ""
) -> tuple[tuple[ReportedProfile, ...], tuple[ReportedRun, ...]]:
    """Return the inputs of a report of it all, with a profile that was only probed."""
    manifest, path = (
        example_manifest(note),
        Path(f"profiles/bert-120m-h100-nvl{note.replace('/', ' ')[:40]}.toml"),
    )
    profile = example_profile(manifest.dataset_hash, note)
    review = ApprovalRecord(
        profile_sha256="0" * 64,
        decision="approved",
        by=f"A. Reviewer{note}"[:200],
        time_utc="2026-11-22",
        note=f"go{note}"[:2000],
    )
    one = ReportedProfile(
        path=path,
        profile=profile,
        intact=True,
        content_sha256="ab" * 32,
        trials=example_trials(trials, note),
        corrupt_lines=1,
        dataset=manifest,
        bottlenecks=(example_bottleneck("worker sweep", note),),
        advice=example_advice(note),
        approval=Approval(state="approved", present_sha256="0" * 64, review=review),
    )
    bare = profile.model_copy(
        update={"evidence": Evidence(probe=profile.evidence.probe)}
    )
    other = ReportedProfile(
        path=Path("profiles/bert-120m-again.toml"),
        profile=bare,
        intact=False,
        content_sha256="cd" * 32,
        trials=(),
        corrupt_lines=0,
    )
    directory = Path(f"runs/20261122T034808Z{note.replace('/', ' ')[:40]}")
    run = example_run(directory, one.content_sha256, manifest.dataset_hash, note)
    found = (example_bottleneck("run", note),)
    return (one, other), (
        ReportedRun(
            run=run,
            profile_path=path,
            matched_by="the profile's hash",
            bottlenecks=found,
        ),
    )
