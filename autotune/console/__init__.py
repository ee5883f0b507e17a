"""Options that commands share, completion, `--slurm`, and the guard of login nodes."""
