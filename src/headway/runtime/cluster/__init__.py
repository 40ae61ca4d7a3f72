"""Many instances behind one endpoint: the controller's live side, the instances' agents, and the messages between them.

`client` and `live_controller` run in the server's process: they carry out what a placement policy decides. The
`instance_agent` runs in each engine process: it computes spans and moves KV beside the scheduler. No torch in here.
"""
