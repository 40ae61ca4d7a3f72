"""How long things take: data sheets of hardware, and latency models.

Start with `hardware`, `latency.base` and `latency.table`.

1. Policies and simulators ask this package for predicted seconds; nothing here measures, waits or reads a clock.
2. FLOPs and bytes are exact counts; rates are divided by at the end.
"""
