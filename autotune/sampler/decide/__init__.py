"""The sampler's model, all pure.

``discrete_space`` encodes configurations. ``effects_model`` predicts all of them from
trials of some, and ``improvement`` says what another trial may gain.
"""
