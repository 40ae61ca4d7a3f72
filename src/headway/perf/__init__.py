"""How long things take: hardware data sheets, latency models, and the operator-level accelerator study.

Policies and simulators ask this package for predicted seconds; nothing here measures or waits.
"""
