"""What torch's CPU flash kernel really does: the reasons of the sdpa room's refusals and repairs.

A test that fails here after an update of torch says that a refusal or a repair may go, or that another is needed.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tilewise.backends.sdpa.kernel import LANES

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
INF, NAN = float("inf"), float("nan")


def heads_second(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def test_lse_is_natural_with_heads_second() -> None:
    q, k, v = (heads_second(2, 3, 20, 8) for _ in range(3))
    out, lse = FORWARD(q, k, v, 0.0, False, scale=0.5)
    scores = 0.5 * q @ k.mT
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)


def test_causal_is_top_left() -> None:
    q, k, v = heads_second(1, 1, 4, 8), heads_second(1, 1, 20, 8), heads_second(1, 1, 20, 8)
    out, _ = FORWARD(q, k, v, 0.0, True)
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, 0])


def test_a_row_without_keys_gets_zero_as_its_lse() -> None:
    q, k, v = (heads_second(1, 1, 20, 8) for _ in range(3))
    added = torch.zeros(20, 20)
    added[3] = -INF
    out, lse = FORWARD(q, k, v, 0.0, False, attn_mask=added)
    assert float(lse[0, 0, 3]) == 0
    assert not out[0, 0, 3].any()


@pytest.mark.parametrize("keys", [1, 7, LANES - 1])
def test_nan_queries_turn_to_zeros_below_one_vector_of_keys(keys: int) -> None:
    q, k, v = heads_second(1, 1, 3, 8), heads_second(1, 1, keys, 8), heads_second(1, 1, keys, 8)
    q[0, 0, 1] = NAN
    out, lse = FORWARD(q, k, v, 0.0, False)
    if not (lse == 0).any():
        pytest.skip(f"{keys} keys fill a vector register of this processor")
    assert not out[0, 0, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys", [LANES, LANES + 1, 513, 1025])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_queries_stay_nan_from_one_vector_of_keys_on(keys: int, dtype: torch.dtype, causal: bool) -> None:
    q, k, v = (heads_second(1, 2, keys, 8, dtype=dtype) for _ in range(3))
    rows = torch.arange(keys) % 3 == 1
    q[:, :, rows] = NAN
    out, lse = FORWARD(q, k, v, 0.0, causal)
    assert bool(out[:, :, rows].isnan().all())
    assert bool(lse[:, :, rows].isnan().all())
    assert bool(out[:, :, ~rows].isfinite().all())


def test_a_nan_in_a_key_that_is_masked_everywhere_spreads() -> None:
    q, k, v = (heads_second(1, 1, 20, 8) for _ in range(3))
    added = torch.zeros(1, 1, 1, 20)
    added[..., 5] = -INF
    k[0, 0, 5] = NAN
    assert bool(FORWARD(q, k, v, 0.0, False, attn_mask=added)[0].isnan().any())


def test_a_scale_that_is_not_positive_breaks_the_triangle() -> None:
    q, k, v = (heads_second(1, 1, 20, 8) for _ in range(3))
    for scale in (0.0, -1.0):
        assert bool(FORWARD(q, k, v, 0.0, True, scale=scale)[0].isnan().any())


def test_other_value_widths_are_refused() -> None:
    q, k, v = heads_second(1, 1, 20, 8), heads_second(1, 1, 20, 8), heads_second(1, 1, 20, 4)
    with pytest.raises(RuntimeError, match="same head size"):
        FORWARD(q, k, v)


def test_a_mask_must_be_a_float_tensor() -> None:
    q, k, v = (heads_second(1, 1, 20, 8) for _ in range(3))
    with pytest.raises(RuntimeError, match="same data type"):
        FORWARD(q, k, v, attn_mask=torch.ones(20, 20, dtype=torch.bool))


@pytest.mark.slow
def test_an_empty_size_ends_the_process() -> None:
    code = (
        "import torch; q = torch.randn(1, 1, 0, 8); k = torch.randn(1, 1, 4, 8)\n"
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode != 0
