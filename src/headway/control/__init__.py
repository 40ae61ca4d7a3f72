"""The cluster controller: it carries out the actions of a placement policy, whole or not at all, and reports what
happens.

Start with `controller` (the state machine), `entries` (the queues, and why they cannot deadlock) and `backend` (what
computes and moves bytes behind it).

1. `ClusterController` reads no clock and does no I/O: simulator, live clusters and replay share it.
2. One total order over all queue entries: groups neither deadlock nor overtake each other.
3. KV room is reserved before an action begins, in one account (`kv`).
"""
