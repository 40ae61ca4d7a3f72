"""Model shapes and machines, as numbers. Nothing here is measured at run time."""
