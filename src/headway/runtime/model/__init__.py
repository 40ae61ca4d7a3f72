"""Decoder families as data: configuration, loading, rotary embedding, the forward pass, and sampling.

One decoder runs all supported families; a row of `family` says in what they differ. Weights are read from safetensors
into the shard that a rank holds, and packed for the processor at hand.
"""
