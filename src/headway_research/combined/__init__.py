"""The ladder, the default placement, against those of papers."""
