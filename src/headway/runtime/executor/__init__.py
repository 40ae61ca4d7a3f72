"""Carries out batches on a model: in one process, or over tensor-parallel, pipeline and KV-parallel ranks."""
