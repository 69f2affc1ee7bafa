"""Which backend runs a problem, and why not the others."""
