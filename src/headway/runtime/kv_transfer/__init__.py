"""Transfer of KV between instances: connections between ends, connectors, and what a rank sends and receives.

`peers` holds the connections of one process to the others (ZeroMQ). A connector (`peer_connector`) moves slices of KV
over them, through memory that the other end reads (`slab_memory`: shared, `nixl_memory`: NIXL); `pool_port` and
`rank_transfer` read and write the pool. No torch in `peers`.
"""
