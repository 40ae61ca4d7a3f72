"""Placement policies: choice of the instances for each span or request, from a snapshot of the cluster. Simulator and
live cluster use the same objects."""
