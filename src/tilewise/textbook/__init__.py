"""The handbook as code: one short file per algorithm, on torch alone.

Each runs as ``python -m tilewise.textbook.NAME``:

softmax         why the maximum is subtracted, and how one pass over the scores is enough
block_merge     states (m, l, a) of blocks of keys, merged in any order; o = a / l
materialising   attention in three passes over slow memory, with every byte counted
causal_tiles    which tiles of the score matrix a causal mask or a window skips
recomputation   the backward pass from lse instead of stored probabilities
"""
