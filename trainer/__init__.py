"""Data-parallel trainer for masked language models, configured by tuned profiles."""
