"""Exact attention in pure Python, on any device."""
