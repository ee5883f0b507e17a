"""Settings of a run: their schema, the built-in models, and where values come from.

``train_config.TrainConfig`` declares every setting with its default and meaning; begin
reading there. ``resolve.resolve`` combines a profile with the command line and the
environment, ``compilers.with_compile`` decides whether layers can be compiled, and
``settings_text`` prints the settings that differ from the defaults.
``presets.model_settings`` finds a model by name or file. No torch here.
"""
