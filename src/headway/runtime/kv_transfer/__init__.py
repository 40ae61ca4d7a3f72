"""Transfer of KV between instances: connections between peers, connectors, and what a rank sends and receives.

Start with `connector` (the interface), `port` (the pool's side) and `local` (the connector `peers`); `nixl` moves the
same slices by NIXL.

1. The holder of KV pushes it, slice by slice; a decode begins when all of it has arrived.
2. A loss is reported on one side at least.
3. Slots that are being sent are copied out before they change.
"""
