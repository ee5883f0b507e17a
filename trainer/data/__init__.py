"""The dataset, and micro-batches of it: batch plan, sampling, packing, masking and loading."""
