"""The bundled masked-LM trainer as a subject.

With ``launch`` this is the only package, apart from jobs, that knows the trainer:
``subject`` names its step and its loader, which ``jobs`` build. ``export`` translates
its settings for other trainers.
"""
