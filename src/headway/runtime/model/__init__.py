"""Decoder families as data: configuration, loading, rotary embedding, the forward pass, and sampling."""
