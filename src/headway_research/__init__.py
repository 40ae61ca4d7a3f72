"""Reproductions of the papers' figures and claims on Headway's scheduler, simulator and latency models.

README.md says how to read it. Start with `registry` (the ids), `base` (what an experiment takes and returns) and
`verdicts` (the rules that compare a result with a claim).

1. The package imports `headway`; `headway` imports nothing of it.
2. No assumption is fitted to a figure: a folder's `setting` is fixed for all figures of its paper.
3. A rule for a verdict is fixed before the numbers are known.
"""
