"""Simulation of a cluster in virtual time: the real controller and a placement policy over a simulated backend.

Start with `simulation` (`simulate_cluster`), `backend` (what takes time and room) and `build` (scenario to inputs).

1. Schedulers inside simulated instances are the real ones.
2. The same scenario and seed give the same result, byte for byte.
"""
