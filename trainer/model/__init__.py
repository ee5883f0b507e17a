"""The encoder with its masked-LM loss.

``encoder`` builds transformers' modules, ``packing`` verifies that documents can share
a sequence, and ``attention`` chooses how they attend. ``precision`` lets linear layers
compute with working copies in bf16 or float8, and ``sparse_last_layer`` computes the
last layer for masked tokens only. ``loss`` is the cross-entropy. ``MaskedLM`` in
``masked_lm`` puts them together: begin reading there. ``flops`` counts the FLOPs of a
step and ``gpu_peaks`` is the table of GPUs' peak rates; they and ``families`` need no
torch. All others import torch and transformers, so
nothing is exported here.
"""
