"""Data-parallel trainer for masked language models, configured by tuned profiles.

``python -m trainer PROFILE`` trains one model on one GPU or CPU; under torchrun it uses
one rank per GPU. It needs a profile and a pre-tokenised dataset, both of which autotune
makes, and runs without autotune.

Begin reading in ``__main__``, which checks the input, and ``rank_job``, in which a rank
trains and records its exit. ``loop`` then tells a run from its first to its last step,
with the parts that ``preparation`` and ``build`` make.
"""
