"""Transfer of KV between instances: connections and streams, connectors, and what a rank sends and receives.

`peers` holds the connections of one process to the others. A connector (`connector`: over sockets and shared memory, or
NIXL) moves slices of KV over them; `pool_port` and `rank_transfer` read and write the pool. No torch in `peers`.
"""
