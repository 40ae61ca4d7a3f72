"""The packing-prefetch paper: KV is prefetched into on-chip memory while HBM is idle (`headway accel`).

After "Architecting Long-Context LLM Acceleration with Packing-Prefetch Scheduler and Ultra-Large Capacity On-Chip
Memories" (Lee et al.). Read `machine` (what is modelled), `mapping` and `operators` (the cost of each operator), then
`stage` (the timeline of an iteration, and the smallest buffer, bandwidth and chunk that suffice). `serving` is the same
model for the scheduler. `stage_figures` and `service_figures` reproduce the paper.
"""
