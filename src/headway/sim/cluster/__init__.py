"""A cluster in virtual time: placements act, spans run on groups of instances, schedulers run inside instances."""
