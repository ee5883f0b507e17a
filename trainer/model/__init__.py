"""The encoder with its masked-LM loss.

Begin reading at ``MaskedLM`` in ``masked_lm``, which puts the parts together:

- ``encoder_config`` makes the config of an encoder, from which ``encoder`` builds
  transformers' modules.
- ``attention`` chooses how documents of a sequence attend, and ``varlen`` is the kernel
  that computes them one by one. ``encoder_inputs`` gives the encoder their bounds.
- ``verify_packing`` and ``verify_copies`` verify what an architecture can do, on the
  small copies of ``probe``.
- ``working_copies``, ``layer_norms`` and ``float8`` set the precision of compute.
- ``fixed_sizes`` fixes numbers that shapes depend on.
- ``sparse_last_layer`` computes the last layer for masked tokens only, whose queries
  are in ``last_layer_queries``.
- ``loss`` is the cross-entropy, and ``fused_loss`` computes it without all logits.

``flops`` counts the FLOPs of a step; it and ``requirements`` need no torch. All others
import torch, most of them transformers too, so nothing is exported here.
"""
