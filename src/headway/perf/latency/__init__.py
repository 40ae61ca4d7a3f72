"""Latency models: predicted seconds of an iteration or of a prefill, for schedulers, placement policies and the
simulator.

Start with `base` (the interface and the largest chunk that fits a budget), `table` (what every source is compiled to)
and `corrected` (what an engine learns while it serves).

1. An iteration's time is a sum of separate terms: rows, the decodes' attention, each chunk's attention.
2. More work never takes less time, so that the largest chunk within a budget is found exactly.
3. The same observations in the same order give the same predictions, so a recorded run replays.
"""
