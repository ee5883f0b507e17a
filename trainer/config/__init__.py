"""Settings of a run, and the source of each value.

``trainer.formats.train_config`` declares every setting with its default and meaning;
begin reading there. ``resolve.resolve`` combines a profile with the command line and
the environment, ``compilers.with_compile`` decides whether layers can be compiled, and
``settings_text`` prints the settings that differ from the defaults. No torch here.
"""
