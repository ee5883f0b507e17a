"""Baselines of the tuned settings of the bundled trainer.

``recipes`` are other settings of the bundled trainer. ``subject`` are other trainers on
the same model and dataset: transformers' own ``Trainer``, and the trainer of the paper,
which ``mlm.jobs`` build. ``comparison`` puts them together.
"""
