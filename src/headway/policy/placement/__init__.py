"""Many instances: where does the next span go? Policies over a view of the cluster; live or simulated, the same."""
