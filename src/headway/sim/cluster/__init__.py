"""A cluster in virtual time.

The real controller (`headway.control`) and a placement policy run on a simulated backend: spans take predicted times on
groups of instances, the real schedulers run inside instances, and KV crosses links. `build` makes it from a scenario,
`simulation.simulate_cluster` runs it.
"""
