"""Pure decisions on profiles: no torch, files, clock or environment.

``batch_split`` chooses the micro-batch size, ``rates`` the throughput to expect,
``explain`` the reason of every setting, ``follow_up`` the commands to run next;
``trial_log_check`` compares a profile with its trials, ``export`` translates it.
"""
