"""CASES.md: the rows that this suite leaves to another one, each skipped with its reason."""

from __future__ import annotations

import pytest

ELSEWHERE = {
    7: "paged caches come with kvcache/",
    9: "paged caches come with kvcache/",
    49: "split-KV comes with kvcache/",
    61: "caches come with kvcache/",
    95: "no function returns the maximal logit",
    99: "tests/gpu/test_triton_gpu.py: CUDA graphs need a GPU",
    119: "tests/gpu/test_streams.py: needs two GPUs",
    121: "caches come with kvcache/",
    123: "rotary embedding comes with kvcache/",
    125: "paged caches come with kvcache/",
    127: "split-KV comes with kvcache/",
    129: "FP8 needs a GPU",
    135: "context parallelism comes with distributed/",
    137: "context parallelism comes with distributed/",
    139: "tests/integrations/test_transformers_packing.py",
    141: "tests/integrations/test_transformers_attention.py",
    143: "nested tensors are no input of attention; the packed form takes one sequence of one token in case_19",
    163: "context parallelism comes with distributed/",
}


@pytest.mark.parametrize("number", list(ELSEWHERE), ids="case_{}".format)
def test_left_to_another_suite(number: int) -> None:
    pytest.skip(ELSEWHERE[number])
