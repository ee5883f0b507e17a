"""The queue: all stages, the most valuable first."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.bars import EXIT_HELD, EXIT_SHORT, EXIT_UNMEASURED
from benchmarks.gpu.stage import PROFILES, RUNS, Stage
from benchmarks.gpu.step_settings import STEP_SETTINGS, reason_unavailable

SAVES_FILE = "saves.json"
ENDING_S = 20.0
"""Time for autotune's commands to end: a training saves first."""
TRAINERS = ("compiled", "bf16", "grouped", "defaults", "paper")
"""Configurations of ``benchmarks.trainers``; the fastest is expected first."""
SHAPES = ("dynamic", "static")
"""Shapes of compiled layers, for ``benchmarks.step_shapes``."""
RESIDUAL_STREAMS, RESIDUAL_SEEDS = ("fp32", "bf16"), (0, 1)
RESIDUAL_STEPS, RESIDUAL_SEQUENCES = 1500, 64

MEMORY = {
    "bert-120m-dropout": "--model bert-120m --attention-dropout 0.1",
    "bert-120m-eager": "--model bert-120m --no-compile",
    "bert-120m-full": "--model bert-120m --activation-checkpointing full",
    "bert-120m-selective": (
        "--model bert-120m --no-compile --activation-checkpointing selective"
    ),
    "bert-120m-fp32-padded": "--model bert-120m --precision fp32 --layout padded",
    "bert-120m-128": "--model bert-120m --seq-length 128",
    "bert-350m-full": "--model bert-350m --activation-checkpointing full",
    "bert-350m-fp32-padded": "--model bert-350m --precision fp32 --layout padded",
    "modernbert-base-fp32": "--model modernbert-base --precision fp32",
    "modernbert-base-1024-full": (
        "--model modernbert-base --seq-length 1024 --activation-checkpointing full"
    ),
    "modernbert-large": "--model modernbert-large",
}
"""Further configurations whose memory is predicted and measured: options of probe."""
EXAMPLES = {
    "hf_trainer_causal_lm": ("accelerate",),
    "lightning_vision": ("lightning",),
    "accelerate_token_classifier": ("accelerate",),
}
"""Examples of other people's training code, with the modules that they need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes and durations of all stages."""

    models: tuple[str, ...] = ("bert-120m", "bert-350m")
    """Models that are tuned, the first of them also compared with other trainers."""
    probed_models: tuple[str, ...] = ("modernbert-base",)
    """Models that are probed and trained."""
    step_sizes: tuple[int, ...] = (64, 256)
    """Sequences of the steps whose settings are compared."""
    memory: Mapping[str, str] = field(default_factory=lambda: MEMORY)
    examples: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: EXAMPLES)
    capped_gpu: str = "h100-nvl-94gb"
    """GPU whose memory a larger one stands in for."""
    capped_on_bytes: int = 120 * 10**9
    """Least memory of that larger one."""
    probe: str = "--time-limit {minutes}min"
    """Options of commands that probe."""
    eager: str = ""
    """Options of probes, so that layers are not compiled."""
    window: str = ""
    """Options of commands that time windows."""
    tune: str = ""
    """Further options of ``tune``."""
    training: str = ""
    """Further options of ``train``."""
    program: str = ""
    """Further options of this repository's programs."""
    seq_length: int = 512
    steps: int = 30
    """Optimizer steps of a training."""
    steps_of_models: Mapping[str, int] = field(
        default_factory=lambda: {"bert-350m": 20}
    )
    """Optimizer steps of a training, for models that need other ones."""
    residual_sequences: int = RESIDUAL_SEQUENCES
    residual_steps: int = RESIDUAL_STEPS
    save_repeats: int = 5
    patience: float = 1.0
    """Times the longest that a stage may take."""
    measuring_share: float = 0.72
    """Share of a stage's time for the measurements of autotune's commands, which may
    exceed it by a fifth."""
    samples: int = 100_000
    vocab_size: int = 30_522


FULL = Sizes()
TINY = Sizes(
    models=("bert-mini",),
    probed_models=(),
    step_sizes=(2,),
    memory={},
    examples={},
    capped_gpu="a100-40gb",
    capped_on_bytes=0,
    probe=(
        "--max-micro-batch-size 4 --trial-timeout 120s --global-batch-tokens 1024"
        " --time-limit 10min"
    ),
    eager="--no-compile",
    window="--window 0.3s",
    tune="--skip workers --skip network --skip baseline --skip accumulation",
    training="--set train.compile=false",
    program="--tiny",
    seq_length=64,
    steps=4,
    residual_sequences=4,
    residual_steps=4,
    save_repeats=1,
    patience=3.0,
    measuring_share=0.3,
    samples=400,
    vocab_size=500,
)


def stages_of(sizes: Sizes) -> tuple[Stage, ...]:
    """Return the queue, the most valuable stages first."""
    makers = _Makers(sizes)
    return (
        makers.arithmetic(),
        *makers.promises(),
        *makers.step_settings(),
        *makers.probed_trainings(),
        *makers.trainers(),
        *makers.capped_memory(),
        *makers.residual_streams(),
        *makers.memory(),
        *makers.rest(),
    )


def tuned_profile(model: str) -> str:
    """Return the path of a profile, with a placeholder for the GPU."""
    return f"{PROFILES}/{model}-{{gpu}}.toml"


@dataclass(frozen=True, slots=True)
class _Makers:
    """Make the stages of each subject."""

    sizes: Sizes

    @property
    def first(self) -> str:
        """Model that is compared with other trainers."""
        return self.sizes.models[0]

    def arithmetic(self) -> Stage:
        """Return the proof that the GPU computes."""
        return Stage(
            name="arithmetic",
            words=("-m", "benchmarks.gpu.arithmetic"),
            least_s=10,
            most_s=60,
            code=("benchmarks/gpu/arithmetic.py",),
            every_call=True,
        )

    def promises(self) -> Iterator[Stage]:
        """Yield tunings, which promise a rate, and trainings, which deliver one."""
        sizes = self.sizes
        for model in sizes.models:
            words = (
                f"tune --model {model} {sizes.probe} {sizes.window} {sizes.tune}"
                f" --data data --seq-length {sizes.seq_length} --here --json"
                f" --out {PROFILES} --reports tune/reports"
            )
            yield self._autotune(
                f"tune-{model}", words, 290, 360, writes=tuned_profile(model)
            )
            yield self._training(model)

    def probed_trainings(self) -> Iterator[Stage]:
        """Yield probes and trainings of models that are not tuned."""
        for model in self.sizes.probed_models:
            profile = tuned_profile(model)
            yield self._probe(model, f"--model {model}", 180, profile=profile)
            yield self._training(model)

    def step_settings(self) -> Iterator[Stage]:
        """Yield comparisons of settings of a step, and of shapes."""
        sizes = self.sizes
        common = f"--model {self.first} --seq-length {sizes.seq_length} {sizes.program}"
        code = ("trainer", "benchmarks/step_timing.py")
        for row in STEP_SETTINGS:
            for size in sizes.step_sizes:
                words = (
                    f"-m benchmarks.step_ablation {row.name} --size {size} {common}"
                    " --seconds {seconds}"
                )
                yield Stage(
                    name=f"step-{row.name}-{size}",
                    words=tuple(words.split()),
                    least_s=50,
                    most_s=sizes.patience * 63,
                    measuring_share=0.15,
                    code=(*code, "benchmarks/step_ablation.py"),
                    modules=(row.module,) if row.module else (),
                    unavailable=reason_unavailable(row),
                )
        for shapes in SHAPES:
            # The third size shows whether the second one's code is used again.
            numbers = " ".join(
                f"--size {times * sizes.step_sizes[0]}" for times in (1, 2, 3)
            )
            words = f"-m benchmarks.step_shapes {shapes} {numbers} {common}"
            yield Stage(
                name=f"shapes-{shapes}",
                words=tuple(words.split()),
                least_s=60,
                most_s=sizes.patience * 100,
                code=(*code, "benchmarks/step_shapes.py"),
            )

    def trainers(self) -> Iterator[Stage]:
        """Yield other trainers on the same data."""
        sizes = self.sizes
        for name in TRAINERS:
            words = (
                f"-m benchmarks.trainers {name} --data data --model {self.first}"
                f" --seq-length {sizes.seq_length} {sizes.program}"
                " --seconds {seconds}"
            )
            yield Stage(
                name=f"trainer-{name}",
                words=tuple(words.split()),
                least_s=80,
                most_s=sizes.patience * 120,
                measuring_share=0.15,
                code=(
                    "benchmarks/trainers.py",
                    "autotune/subjects/mlm/jobs/paper_model.py",
                ),
                modules=() if name == "paper" else ("accelerate",),
                reference=f"train-{self.first}",
            )

    def capped_memory(self) -> Iterator[Stage]:
        """Yield probes with the memory of a smaller GPU."""
        sizes = self.sizes
        paper = "--precision fp32 --layout padded --no-compile"
        for name, options, least_s, most_s in (
            ("", sizes.eager, 90, 240),
            ("-fp32-padded", paper, 90, 180),
        ):
            for model in sizes.models:
                profile = f"{PROFILES}/{model}{name}-{sizes.capped_gpu}.toml"
                yield self._probe(
                    f"{model}{name}-capped",
                    f"--model {model} --gpu {sizes.capped_gpu} {options}",
                    most_s,
                    profile=profile,
                    least_s=least_s,
                    least_memory_bytes=sizes.capped_on_bytes,
                )

    def residual_streams(self) -> Iterator[Stage]:
        """Yield trainings with either dtype of the residual stream."""
        sizes = self.sizes
        for seed in RESIDUAL_SEEDS:
            for dtype in RESIDUAL_STREAMS:
                name = f"residual-{dtype}-{seed}"
                settings = {
                    "residual_dtype": dtype,
                    "seed": seed,
                    "micro_batch_size": sizes.residual_sequences,
                    "global_batch_size": sizes.residual_sequences,
                    "max_steps": sizes.residual_steps,
                    "log_interval_steps": min(50, sizes.residual_steps),
                    "checkpoint.interval_s": 45,
                }
                options = " ".join(
                    f"--set train.{key}={value}" for key, value in settings.items()
                )
                words = (
                    f"train {tuned_profile(self.first)} --data data"
                    f" {options} {sizes.training} --out {RUNS}/{name}"
                )
                yield self._autotune(
                    name,
                    words,
                    80,
                    180,
                    code=("trainer",),
                    reads=tuned_profile(self.first),
                )

    def memory(self) -> Iterator[Stage]:
        """Yield probes of further configurations, whose memory is predicted too."""
        for name, options in self.sizes.memory.items():
            yield self._probe(name, f"{options} --trial-timeout 80s", 120)

    def rest(self) -> Iterator[Stage]:
        """Yield examples, saves, workers, imitations of trainers, and a long tuning."""
        sizes, model = self.sizes, self.first
        for name, modules in sizes.examples.items():
            words = (
                f"probe --step {name}:build_step --memory 2GB --here --json"
                f" --out own-code/{name}.toml --reports own-code"
            )
            yield self._autotune(f"own-code-{name}", words, 45, 90, modules=modules)
        saves = (
            f"-m benchmarks.checkpoint --device cuda --only-stall --model {model}"
            f" --dir . --json {SAVES_FILE} --repeats {sizes.save_repeats}"
        )
        yield Stage(
            name="saves",
            words=tuple(saves.split()),
            least_s=60,
            most_s=sizes.patience * 240,
            code=("trainer", "benchmarks/checkpoint.py", "benchmarks/saves.py"),
            answer=SAVES_FILE,
            exit_codes=(EXIT_HELD, EXIT_SHORT, EXIT_UNMEASURED),
        )
        profile = tuned_profile(model)
        read = f"{profile} --data data"
        timed = f"{read} --time-limit {{minutes}}min --here --json"
        for name, words, least_s, most_s, gpus in (
            ("workers", f"workers {timed} {sizes.window}", 60, 240, 1),
            ("baseline", f"baseline {timed} {sizes.window}", 60, 240, 1),
            ("network", f"network {timed}", 60, 240, 2),
            (
                "scale",
                f"network --predict {read} --bandwidth 100Gbit --json",
                10,
                60,
                2,
            ),
        ):
            yield self._autotune(
                f"{name}-{model}", words, least_s, most_s, reads=profile, gpus=gpus
            )
        yield self._autotune(
            f"advise-{model}",
            f"advise {RUNS}/{model} --data data --json",
            10,
            60,
            reads=f"{RUNS}/{model}",
        )
        yield self._autotune("doctor", "doctor --measure --json", 30, 120)
        models = " ".join(f"--model {name}" for name in sizes.models)
        newcomer = (
            f"tune {models} {sizes.probe} {sizes.window} {sizes.tune} --data data"
            f" --seq-length {sizes.seq_length} --here --json"
            f" --out newcomer/{PROFILES} --reports newcomer/reports"
        )
        yield self._autotune("newcomer", newcomer, 300, 1200)

    def _training(self, model: str) -> Stage:
        """Return a short training with the profile of a model, loop included."""
        sizes, run = self.sizes, f"{RUNS}/{model}"
        steps = sizes.steps_of_models.get(model, sizes.steps)
        profile = tuned_profile(model)
        words = (
            f"train {profile} --data data --set train.max_steps={steps}"
            " --set train.log_interval_steps=2 --set train.checkpoint.enabled=false"
            f" {sizes.training} --out {run}"
        )
        return self._autotune(
            f"train-{model}",
            words,
            90,
            120,
            code=("trainer",),
            reads=profile,
            writes=run,
            from_scratch=run,
            is_training=True,
        )

    def _probe(
        self,
        name: str,
        options: str,
        most_s: float,
        *,
        profile: str | None = None,
        least_s: float = 45,
        least_memory_bytes: int = 0,
    ) -> Stage:
        """Return a probe, whose profile is named as itself by default."""
        sizes = self.sizes
        profile = profile or f"{PROFILES}/{name}.toml"
        # Limited, as layers are compiled for each size: smaller sizes are left out.
        words = (
            f"probe --data data --seq-length {sizes.seq_length} {options}"
            f" {sizes.probe} --here --json --out {profile}"
        )
        return self._autotune(
            f"probe-{name}",
            words,
            least_s,
            most_s,
            writes=profile,
            least_memory_bytes=least_memory_bytes,
        )

    def _autotune(
        self,
        name: str,
        words: str,
        least_s: float,
        most_s: float,
        *,
        code: tuple[str, ...] = ("autotune", "trainer"),
        reads: str | None = None,
        writes: str | None = None,
        from_scratch: str | None = None,
        is_training: bool = False,
        gpus: int = 1,
        least_memory_bytes: int = 0,
        modules: tuple[str, ...] = (),
    ) -> Stage:
        """Return a stage that runs one of autotune's commands."""
        sizes = self.sizes
        return Stage(
            name=name,
            words=("-m", "autotune", *words.split()),
            least_s=least_s,
            most_s=sizes.patience * most_s,
            measuring_share=sizes.measuring_share,
            ending_s=ENDING_S,
            code=code,
            reads=reads,
            writes=writes,
            from_scratch=from_scratch,
            is_training=is_training,
            gpus=gpus,
            least_memory_bytes=least_memory_bytes,
            modules=modules,
        )
