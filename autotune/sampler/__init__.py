"""An Optuna sampler for settings that act independently or in pairs.

``pairwise_effects.PairwiseEffectsSampler`` proposes the next trial of every search of
this project, and you can use it in studies of yours. Its model is in ``decide``.
"""
