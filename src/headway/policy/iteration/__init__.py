"""One instance: which requests, and how many of their tokens, go into this iteration?

Start with `scheduler` (add, schedule, complete), `decision` (the policy that it asks) and `config` (its settings).

1. Tokens and blocks are counts here: no text, no tensors, no clock, no waiting.
2. Decodes come first; prefills share the time that is left, most urgent first.
3. KV is reserved before a batch is committed; the same calls give the same batches.
"""
