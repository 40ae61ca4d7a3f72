"""Operator-level accelerator model: mappings and a timeline of one packed iteration, with KV prefetched on chip.

After "Architecting Long-Context LLM Acceleration with Packing-Prefetch Scheduler and Ultra-Large Capacity On-Chip
Memories" (Lee et al.). `stage.simulate_stage` simulates a stage; `serving.AcceleratorLatency` is the same model for the
scheduler; `sizing` computes the smallest sufficient buffer, bandwidth and chunk.
"""
