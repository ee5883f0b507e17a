"""Options that commands share, shell completion, `--slurm`, and the guard for login nodes."""
