"""SLURM: jobs and their scripts, the site file, and the rendezvous of ranks on several nodes."""
