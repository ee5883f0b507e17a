"""Examples of profiles, trials, runs and checkpoints, to change in a test."""
