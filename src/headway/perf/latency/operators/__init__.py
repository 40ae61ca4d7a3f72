"""Latency models from profiles of single operators: fits by operator family, and their compilation to tables.

Start with `device_fit`; `linear` and `attention` are the families, `curves` what they are fitted with. Profiles are
read and fitted by `headway_research.fit`.
"""
