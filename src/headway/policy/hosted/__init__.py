"""The iteration policy inside another engine's scheduler, such as vLLM's. Nothing here imports that engine."""
