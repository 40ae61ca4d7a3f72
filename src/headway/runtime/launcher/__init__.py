"""Starts engine and rank processes on one or several hosts, watches their heartbeats, and stops them.

Node 0 runs the `host_coordinator`; every other host runs a `host_agent` that connects to it, starts processes as asked
and reports their ends. Connections between hosts are encrypted and authenticated (`secret`).
"""
