"""How long things take: hardware data sheets and latency models.

Policies and simulators ask this package for predicted seconds; nothing here measures or waits.
"""
