"""Latency models: predicted seconds of an iteration or a prefill, for policies, the scheduler and the simulator."""
