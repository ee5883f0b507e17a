"""The batch system: what SLURM says about this process."""
