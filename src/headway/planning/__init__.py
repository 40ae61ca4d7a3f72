"""Size a deployment: which layout, number of accelerators and policy meet latency demands on a workload, and at what
cost (Mnemosyne §4.5 and §7 name this planning as what long contexts need).

`question` is the input file, `candidates` the search space, `bounds` and `simulate` judge one candidate, `search` finds
the cheapest one that meets all demands, `answer` holds it with what to type. All simulations are those of
`headway.sim`, with the same policy objects that serve.
"""
