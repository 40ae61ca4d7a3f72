"""Latency models from profiles of single operators: profile readers, fits by operator family, compilation to tables."""
