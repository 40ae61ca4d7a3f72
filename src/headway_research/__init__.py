"""Reproductions of the papers' figures and claims on Headway's own scheduler, simulator and latency models.

One module for each figure, or for a group of closely related ones. `*_setting` modules hold what the figures of a paper
share, `verdicts` the rules that compare a result with a claim, `registry` the ids; `headway reproduce` runs them.
"""
