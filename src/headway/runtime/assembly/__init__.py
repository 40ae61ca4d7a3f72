"""Composition: settings in, running parts out (an engine, its workers, the instances of a cluster, a dry run's report).

Start with `engine` and `cluster`.

1. The only package of `runtime` that imports all the others; nothing else in `runtime` imports it.
2. A process imports torch only if it computes.
"""
