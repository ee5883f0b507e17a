"""All phases in their order, with one time budget, resumable (`tune`)."""
