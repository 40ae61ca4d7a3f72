"""The native engine and its cluster: models, attention, executors, KV transfer, process launching, composition.

Everything that touches torch, sockets, processes or the wall clock to compute tokens is in this package.
"""
