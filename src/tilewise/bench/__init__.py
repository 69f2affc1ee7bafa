"""Measurements: cases, correctness gate before any time, interleaved timing, recorded JSON lines."""
