"""Decoder families as data: configuration, loading, rotary embedding, the forward pass, and sampling.

Start with `config` (what differs between families), `decoder` (the one forward pass) and `loading`.

1. One decoder runs all supported families.
2. A rank reads only its own slices of the weights, and keeps each once, packed for the processor at hand.
3. A sampled token depends on the request's own row, settings, seed and position only.
"""
