"""LoongServe (arXiv 2404.09526): elastic sequence parallelism over a pool of instances, or prefill ones alone."""
