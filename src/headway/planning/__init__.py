"""Size a deployment: which layout, number of accelerators and policy meet latency demands on a workload, and at what
cost (Mnemosyne §4.5 and §7 name this planning as what long contexts need).

Start with `question` (the input file and its candidates), `simulate` (the judgement of one candidate) and `search`.

1. Simulations are those of `headway.sim`, with the policy objects that serve.
2. A candidate is dropped only when it is certain that it misses a demand or costs more.
3. An answer comes with the commands that start it and the scenario that repeats it.
"""
