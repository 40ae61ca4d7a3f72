"""Sequence-parallel prefill: one prompt over many ranks, every strategy a schedule over the one attention primitive.

Schedules are data (`tokens`, `cover`, `ring`, `layout`, `exchanges`, `whole`, `chunk`) that one executor carries out.
`span_executor` and its siblings for several ranks compute the spans that a cluster's controller dispatches.
"""
