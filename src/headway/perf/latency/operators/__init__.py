"""From profiles of single operators to a latency model: readers, fits by operator family, and their compilation."""
