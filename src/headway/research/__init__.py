"""The papers' figures and claims, run on Headway's own scheduler, simulator and latency models.

One module a figure, or a group of closely related ones; `registry` names them, `headway reproduce` runs them.
"""
