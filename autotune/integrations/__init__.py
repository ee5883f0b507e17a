"""Your own training code, and other trainers.

Any PyTorch step and any loader can be tuned (`probe --step`, `workers --loader`).
``finders`` has the functions for Python programs. ``accelerate``, ``lightning`` and
``transformers`` turn those libraries' trainers into steps and loaders.
"""
