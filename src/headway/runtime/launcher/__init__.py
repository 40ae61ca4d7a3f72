"""Starts engine and rank processes: plain subprocesses on this host, and on others through Ray; watches and stops them.

Start with `processes` (the one handle of all), `standby` (a process that has loaded a model and forks engines)
and `ray_hosts`.

1. A child ends with its parent.
2. Connections between hosts are encrypted and authenticated.
"""
