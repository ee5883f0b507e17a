"""Checkpoints: their format on disk, saving, restoring, and resuming a run.

``manager`` saves at the right steps, and is what the training loop uses: begin there.
``format`` defines the files on disk, ``checkpoint_writer`` writes them, and
``stored_checkpoints`` finds, reads and removes them, all without torch. ``tensors``
lists the tensors of the training state under any parallel strategy, ``host_copy``
copies them to host memory, and ``restore`` reads them back. ``async_writer`` writes in
the background, and ``save_events`` reports it. ``resume`` decides how a run starts,
without torch: with ``job`` it finds the run, with ``checkpoint_choice`` the checkpoint,
and with ``changed_settings`` it compares settings. ``export`` writes the trained model
for transformers.

This package exports no names, as ``manager``, ``tensors`` and ``export`` import torch;
import ``manager.CheckpointManager``, ``resume.choose_run``,
``stored_checkpoints.read_checkpoint`` and ``export.export_model`` from their modules.
"""
