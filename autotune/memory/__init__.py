"""Device memory: trace, memory model and breakdown, and the search for the largest micro-batch (`estimate`, `probe`)."""
