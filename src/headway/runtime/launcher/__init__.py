"""Starts engine and rank processes: plain subprocesses on this host, and on others through Ray; watches and stops them.

Start with `standby` (an engine process that waits with its imports done) and `ray_hosts`.

1. A child ends with its parent.
2. Connections between hosts are encrypted and authenticated (`network`).
"""
