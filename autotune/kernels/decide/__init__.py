"""Work of profiled kernels, their bounds, and their names. Pure."""
