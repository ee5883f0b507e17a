"""The batch system: what SLURM says about this process, and jobs that are given to it."""
