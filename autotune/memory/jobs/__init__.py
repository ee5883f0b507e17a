"""Child processes: the only modules that import torch."""
