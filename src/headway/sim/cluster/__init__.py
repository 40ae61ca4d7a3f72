"""Simulation of a cluster in virtual time.

The real controller (`headway.control`) and a placement policy run on a simulated backend: spans take predicted times on
groups of instances, the real schedulers run inside instances, and KV crosses links. `build` compiles a scenario to a
`ClusterSpec`, `simulation.simulate_cluster` runs it, and `result` holds the records and the bars of a Gantt chart.
"""
