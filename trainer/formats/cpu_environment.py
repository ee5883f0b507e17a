"""Environment variables with which the trainer runs; free of torch."""

from collections.abc import Mapping

CPU_ENVIRONMENT: Mapping[str, str] = {
    # By default, idle OpenMP threads spin. On a busy machine this takes the cores that
    # other processes need: a training step then takes up to a hundred times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Defaults of a process that trains on a CPU; your environment takes precedence.

OpenMP reads them when torch is loaded. Trials use them too, so that they measure what
training will do."""
NUMA_VARIABLE = "AUTOTUNE_NUMA_BINDING"
"""Environment variable: ``0`` disables CPU binding."""
