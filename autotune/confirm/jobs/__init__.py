"""Jobs of a confirmation, run in the child process of a trial."""
