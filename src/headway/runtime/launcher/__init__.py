"""Starts engine and rank processes on one or several hosts, watches their health, and stops them."""
