"""Comparison with untuned settings, and the cost of tuning (`baseline`).

``stage.compare_recipes`` compares the tuned settings with transformers' defaults and
with the paper's trainer (``decide.recipes``), in windows of training that ``measure``
runs. ``dataset_recipes`` gives all of them the same global batch on a dataset.
``decide.pay_back`` tells after how much training a tuning has paid for itself.
"""
