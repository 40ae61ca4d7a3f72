"""One attention primitive, one merge, and the backends that drive them over a pool of keys and values."""
