"""The vocabulary that everything else shares: requests, spans, batches, events, errors. No torch, no clock, no I/O."""
