"""Sequence-parallel prefill: one prompt over many ranks, every strategy a schedule over the one attention primitive.

Start with `layout` (tokens and heads by member), `schedule` (the steps of a layer) and `prefill` (their execution).

1. Schedules are data; one executor carries out all strategies.
2. A group may grow between chunks; KV moves from one layout to the next.
3. A span pauses between layers only, on all ranks of its group at the same one.
"""
