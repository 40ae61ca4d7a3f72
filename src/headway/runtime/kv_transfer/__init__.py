"""How instances of a cluster reach each other, and what is moved between them. No torch in `peers`."""
