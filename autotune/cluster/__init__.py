"""The batch system: SLURM, its job scripts, the site file, and how ranks of several nodes meet."""
