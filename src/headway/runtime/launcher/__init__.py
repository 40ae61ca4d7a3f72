"""Starts engine and rank processes: plain subprocesses on this host, and on others through Ray; watches and stops them.

Connections between hosts are encrypted and authenticated (`secret`).
"""
