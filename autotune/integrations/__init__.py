"""Your own training code and other trainers: any PyTorch step, any loader (`probe --step`, `workers --loader`)."""
