"""Forward mode and the gradient of forward mode, as formulas over whole matrices.

Write T for the tangent of the biased scores, T = slope * T_scaled + T_bias - T_alibi * distance with T_scaled =
scale * (T_q k^T + q T_k^T). Then

    lse_tangent = sum_j p_j T_j + p_sink T_sink
    p_tangent   = p * (T - lse_tangent)
    out_tangent = (drop * p_tangent) v + (drop * p) T_v

``second`` is the gradient of L = <dout, out_tangent> + <dlse, lse_tangent> by the primals. With dp = drop * (dout
v^T), dp_t = drop * (dout T_v^T), g = dlse - sum_j p_j dp_j and the row mean E[x] = sum_j p_j x_j:

    L per row      = E[dp T] + g lse_tangent + E[dp_t]
    dL/dT_j        = p_j (dp_j + g)
    dL/ds_j        = p_j (w_j - E[w]) - p_j (sink part of E),   w_j = (dp_j + g) (T_j) - lse_tangent dp_j + dp_t_j

which already contains the dependence of g and lse_tangent on p.
"""

from __future__ import annotations

import torch

from tilewise import scores
from tilewise.backends.reference.formulas import (
    Gradients,
    Matrices,
    dropped,
    heads_second,
    matrices,
    to_layout,
    visible,
    keep_pairs,
)
from tilewise.inputs import Inputs
from tilewise.problem import Problem
