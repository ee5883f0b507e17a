"""The console: options that commands share, completion, `--slurm`, login nodes.

Begin reading in ``options``; ``help`` shows the help and usage errors, and
``slurm_job`` submits a command as a job and keeps measurements off login nodes.
"""
