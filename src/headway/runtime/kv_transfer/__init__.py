"""Transfer of KV between instances: connections between peers, connectors, and what a rank sends and receives.

Start with `local` (the connector), `port` (the pool's side) and `peers` (the connections); `slab_memory` is what bodies
pass through, shared or read by NIXL.

1. The holder of KV pushes it, slice by slice; a decode begins when all of it has arrived.
2. A loss is reported on one side at least.
3. Slots that are being sent are copied out before they change.
"""
