"""All stages in their order, with one time budget, resumable (`tune`)."""
