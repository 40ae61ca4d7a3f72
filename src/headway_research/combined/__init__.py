"""Weave, which joins Tetris between instances with Medha inside them, against its parts and its peers."""
