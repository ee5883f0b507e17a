"""The bundled masked-LM trainer as a subject.

With ``launch`` and ``corpus`` this is the only package that knows the trainer.
``subject`` names its step and its loader, which ``jobs`` build. ``settings`` has what a
joint search varies, and ``model_work`` the work of a step by the model's config.
``memory`` predicts its memory and prepares its probe; ``workers`` makes windows of its
training; ``search``, ``confirm``, ``network`` and ``baselines`` are its parts of these
capabilities, as ``autotune.subjects.parts`` names them; and ``export`` translates its
settings for other trainers.
"""
