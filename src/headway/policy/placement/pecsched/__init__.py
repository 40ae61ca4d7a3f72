"""PecSched: short prefills go to idle replicas, then together with a long decode, then in place of a long prefill.

Start with `policy`; `long` and `short` hold the two classes of requests.
"""
