"""The live page: what runs now and why requests wait, from a server, a cluster or a log.

Start with `feed` (its state, bounded in memory), `pages` (its endpoints) and `recordings` (runs from logs).
"""
