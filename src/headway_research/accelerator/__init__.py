"""The packing-prefetch paper: KV is prefetched into on-chip memory while HBM is idle (`headway accel`).

`stage_figures` and `service_figures` reproduce the paper, `capacity` finds the most requests a second within limits.
"""
