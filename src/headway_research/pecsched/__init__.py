"""PecSched: short requests preempt long prefills in a cluster.

`setting` has the one setting of the figures, `drill` drives the placement policy alone to time its decisions.
"""
