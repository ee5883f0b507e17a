"""Formats that the trainer and the tuner both read and write. No torch here.

``train_config.TrainConfig`` declares every setting of a training, as ``[train]`` of a
profile has them: begin there. ``profile_file`` reads a profile's tables. ``presets``
finds a model by name or file, ``families`` says which models the trainer builds,
``encoder_shape`` and ``model_config`` read the sizes in a model's config, and
``recorded_settings`` reads the settings of a run record or a trial.

``errors`` are the errors that you can act on. ``tables`` reads and validates any TOML
or JSON file, ``nested_tables`` and ``canonical_json`` flatten and hash it. ``files``
and ``file_locks`` write files that a crash leaves intact. ``manifest`` describes a
dataset, ``raw_files`` the files that it was made from, and ``npy_file`` its shards.
``run_record`` reads what a run wrote: its ``batch_split``, its rows of steps, and its
``events``. ``progress`` shows long work on the console. ``gpu_peaks`` has the data
sheets of GPUs, ``cpu_environment`` the variables of a process that computes on a CPU,
``slurm_time`` the time that a job has left, and ``documentation`` the paths of pages.
``process_status`` has the kernel's figures of a process, and ``code_hash`` identifies
the trainer's code. ``nvml`` reads the GPUs of this machine, ``gpus`` has what it reads,
and ``gpu_activity`` combines readings of one GPU over a time.

It imports nothing else of the trainer, so that a program without torch can read a run,
a dataset or a profile.
"""
