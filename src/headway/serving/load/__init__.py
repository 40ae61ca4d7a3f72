"""The load client: load on any OpenAI endpoint, and the convoy experiment. Live only, no torch.

Start with `client` (one request and its record), `convoy` and `load`.
"""
