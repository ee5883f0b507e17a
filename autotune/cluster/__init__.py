"""SLURM: jobs, their scripts, the site file, and the rendezvous of several nodes."""
