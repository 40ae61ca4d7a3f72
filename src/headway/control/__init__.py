"""The cluster controller: it carries out the actions of a placement policy, whole or not at all, and reports what
happens.

`ClusterController` is a deterministic state machine without a clock, shared by the simulator, the live cluster and the
replay of a decision log. It keeps queues, reservations, requests and KV migrations; everything that computes or moves
bytes is behind `InstanceBackend`.
"""
