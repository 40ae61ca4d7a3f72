"""What on-chip memory and an idle HBM channel are worth: operators, mappings and a timeline of one packed iteration.

After "Architecting Long-Context LLM Acceleration with Packing-Prefetch Scheduler and Ultra-Large Capacity On-Chip
Memories" (Lee et al.). A stage is simulated by `stage.simulate_stage`; `serving.AcceleratorLatency` is the same model
for the scheduler; `answers` says how much buffer, bandwidth and chunk are enough.
"""
