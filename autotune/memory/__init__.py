"""Device memory: trace, memory model, breakdown, and the search for the largest micro-batch (`estimate`, `probe`)."""
