"""Placement policies: the choice of instances for each span or request, from a snapshot of the cluster.

Start with `contract` (events, snapshot, actions), `registry` (policies by name) and `baselines` (the simplest ones).

1. A policy sees a snapshot and returns actions; it computes nothing and moves no bytes.
2. The controller carries out an answer whole or refuses it whole.
3. Simulated and live clusters call the same object with the same events.
"""
