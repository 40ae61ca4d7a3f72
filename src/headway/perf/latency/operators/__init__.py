"""Latency models from fits of single operators: one fit for each family of operators, and their compilation to tables.

Fits hold milliseconds, because every known profile states them; `compile` turns them into seconds. Profiles are read
and fitted by `headway profile fit` (`headway_research.fit`); the package ships the fits of two dies.
"""
