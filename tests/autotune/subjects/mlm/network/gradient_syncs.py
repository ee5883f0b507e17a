"""A machine of several nodes whose steps follow from a known network."""

from dataclasses import dataclass, field, replace
from typing import Any

from autotune.errors import BadInput
from autotune.evidence.network import (
    MIB,
    GradientPart,
    GradientSync,
    Link,
    Network,
    RankCompute,
)
from autotune.network.decide.step_model import all_reduce_s, step_time
from autotune.subjects.mlm.network.measure import NetworkRequest, NetworkTuning
from autotune.trials.outcomes import Crashed, Measured, Outcome
from autotune.trials.values import Trial
from testbed.examples.feeds import runner_on
from testbed.fakes import FakeClock
from trainer.formats.train_config import ModelSettings, TrainConfig

LINK = Link(latency_s=1e-4, bytes_per_s=20e6)
COMPUTE = RankCompute(
    sequence_s=0.02,
    micro_batch_s=0.01,
    optimizer_step_s=0.01,
    gradients=tuple(
        GradientPart(elements=400_000, ready_share=(number + 1) / 10)
        for number in range(10)
    ),
)
CONFIG = TrainConfig(
    model=ModelSettings(name="tiny", config={"model_type": "bert"}),
    micro_batch_size=4,
    global_batch_size=16,
)


@dataclass(kw_only=True)
class Cluster:
    nodes: int = 2
    link: Link = LINK
    halved_loss: float = 1.0  # factor of the loss with 16-bit gradients
    failing: tuple[str, ...] = ()  # strategies whose steps crash
    refusing: tuple[str, ...] = ()  # strategies that do not go together with the recipe
    fall: float = 1.0  # of the loss over the steps of a trial
    slowdown_share: float = 0.0  # of computing while messages travel
    trials: list[Trial] = field(default_factory=list)

    @property
    def network(self) -> Network:
        return Network(
            nodes=self.nodes, ranks_per_node=1, between=self.link, trees=False
        )

    def run(self, trial: Trial) -> Outcome:
        self.trials.append(trial)
        return (
            self._links(trial.measured)
            if trial.job == "links"
            else self._steps(trial.measured)
        )

    def _links(self, measured: dict[str, Any]) -> Outcome:
        pairs = [
            [size, all_reduce_s(size, self.network)]
            for size in measured["sizes_bytes"]
            for _ in range(3)
        ]
        return Measured(
            figures={
                "all": pairs,
                "within": [],
                "between": pairs,
                "nodes": self.nodes,
                "ranks_per_node": 1,
                "neighbours_bytes_per_s": [1.0] * (self.nodes if self.nodes > 2 else 1),
                "matmul_flops_per_s": [1e9] * self.nodes,
                "backend": "gloo",
                "transport": "TCP sockets (gloo)",
                "interface": "eth0",
                "interface_bytes_per_s": None,
                "slowdown_share": self.slowdown_share,
            }
        )

    def _steps(self, measured: dict[str, Any]) -> Outcome:
        config = TrainConfig.model_validate(measured["config"])
        parallel = config.parallel
        if parallel.strategy in self.failing:
            return Crashed(detail="it does not run here")
        if parallel.strategy in self.refusing:
            raise BadInput(
                "these two do not go together", next_step="Change one of them."
            )
        micro_batch_size = config.micro_batch_size
        ranks = self.network.ranks
        micro_batches = config.global_batch_size // (micro_batch_size * ranks)
        sync = GradientSync(
            strategy=parallel.strategy,
            gradient_dtype=parallel.gradient_dtype,
            bucket_cap_bytes=parallel.bucket_cap_mib * MIB,
        )
        time = step_time(
            replace(COMPUTE, slowdown_share=self.slowdown_share),
            micro_batch_size,
            micro_batches,
            sync,
            self.network,
        )
        rank_s = micro_batches * COMPUTE.forward_backward_s(micro_batch_size)
        steps = measured["steps"]
        second = time.step_s if measured["synchronise"] else rank_s + 0.01
        factor = 1.0 if parallel.gradient_dtype == "fp32" else self.halved_loss
        return Measured(
            figures={
                "step_s": [second] * steps,
                "optimizer_step_s": COMPUTE.optimizer_step_s,
                "communication_s": time.exposed_s,
                "compute_s_by_rank": [[rank_s] * steps] * ranks,
                "forward_share": COMPUTE.forward_share,
                "gradients": [
                    [part.elements, part.ready_share] for part in COMPUTE.gradients
                ],
                "gradient_accumulation_steps": micro_batches,
                "micro_batch_size": micro_batch_size,
                "tokens_per_step": 100.0 * micro_batch_size * micro_batches * ranks,
                "peak_bytes": 2**20,
                "losses": [
                    (5.0 - self.fall * number / steps) * factor
                    for number in range(steps)
                ],
            }
        )


def tuning_on(cluster: Cluster, directory, **changes) -> NetworkTuning:
    request = NetworkRequest(
        **{
            "config": CONFIG,
            "data_dir": "data",
            "nodes": cluster.network.nodes,
            "ranks_per_node": 1,
            "max_micro_batch_size": 8,
            "tokens_per_sequence": 100.0,
            "budget_s": 1e6,
            "trial_timeout_s": 60.0,
        }
        | changes
    )
    return NetworkTuning(
        request=request, runner=runner_on(cluster, directory, FakeClock())
    )
