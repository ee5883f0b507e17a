"""The run record: files that a run writes while it trains.

``trainer.formats.run_record`` documents and reads them: begin there.
``writer.RunWriter`` writes them during training. ``meter.Meter`` measures the steps for
it, from the sums over ranks in ``interval``, with ``noise_scale`` and ``pace_monitor``;
only ``meter``, ``interval`` and ``process_memory`` import torch. ``boards`` passes the
numbers on to TensorBoard and Weights & Biases, ``show_row`` shows them on the console,
and ``closed_streams`` lets a run survive its console. ``start_clock`` measures the
start.
"""
