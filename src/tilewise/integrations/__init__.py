"""Doors from other libraries into tilewise; each imports its library only when it is used."""
