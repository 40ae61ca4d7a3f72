"""Inside an instance: which rank holds what, what the ranks exchange, and the stream of plans that drives them."""
