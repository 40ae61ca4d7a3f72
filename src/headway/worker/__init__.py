"""Carries out plans on a model. Torch ends here: everything above speaks in ids and counts."""
