"""The iteration policy inside another engine's scheduler, such as vLLM's. Nothing here imports that engine.

Start with `driver` (requests and blocks in, quotas out; which requests may run) and `settings`.

1. A driver can be built again from the host's state at any time.
2. Every decision is logged so that `headway why` and a replay can repeat it without the host.
"""
