"""torch.compile, torch.export, meta tensors, autocast, checkpointing and opcheck."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import tilewise
from tests.rooms import here, usual_dtype
from tilewise import arguments, descale
from tilewise.testing import Spec, make, offsets

pytestmark = pytest.mark.rooms("auto")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(function: Callable, backend: str = "aot_eager", **options: object) -> Callable:
    return torch.compile(function, fullgraph=True, backend=backend, **options)  # type: ignore[call-overload]


TOGETHER = [
    (),
    ("causal", "bias", "sink"),
    ("top_left", "window", "padding", "softcap"),
    ("segments", "alibi_batch", "scale"),
    ("mask", "bias_rows", "sink_batch", "window_left"),
]


@pytest.mark.parametrize("features", TOGETHER, ids="+".join)
def test_every_feature_compiles_into_one_graph_with_its_gradients(features: tuple[str, ...], backend: str) -> None:
    sample = make(Spec(features=features, requires_grad="all"))
    tensors = sample.differentiable()

    def call(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        options = {name: given.get(name, value) for name, value in sample.options.items()}
        return tilewise.attention_with_lse(given["q"], given["k"], given["v"], **options, backend=backend)

    eager, traced = call(tensors), compiled(call)(tensors)
    torch.testing.assert_close(traced, eager)
    sent = (sample.dout, sample.dlse.masked_fill(eager[1].isinf(), 0.0))
    grads = [torch.autograd.grad(state, list(tensors.values()), sent) for state in (eager, traced)]
    torch.testing.assert_close(grads[1], grads[0])


def test_packed_sequences_and_dropout_compile(backend: str) -> None:
    q = torch.randn(12, 2, 8, requires_grad=True)

    def call(q: torch.Tensor, cu: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        out = tilewise.attention_varlen(q, q, q, cu_seqlens_q=cu, causal=True, backend=backend)
        return out + tilewise.attention_varlen(
            q, q, q, cu_seqlens_q=cu, dropout_p=0.5, dropout_seed=seed, backend=backend
        )

    function, seed = compiled(call), torch.tensor(5)
    for lengths in ((5, 7), (0, 12), (12, 0)):
        torch.testing.assert_close(function(q, offsets(lengths), seed), call(q, offsets(lengths), seed))
    seeds = torch.tensor([1, 2])
    assert not torch.equal(function(q, offsets((5, 7)), seeds[0]), function(q, offsets((5, 7)), seeds[1]))


def test_new_shapes_reuse_one_dynamic_graph(backend: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, k, causal=True, bias=bias, backend=backend)

    function = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    frames = []
    # no two sizes of the first call are equal: dynamo takes equal ones for the same
    for batch, seqlen_q, seqlen_k in ((3, 7, 9), (5, 20, 33), (6, 41, 12), (10, 19, 100)):
        q, k = torch.randn(batch, seqlen_q, 4, 8), torch.randn(batch, seqlen_k, 2, 8)
        bias = torch.randn(1, 1, seqlen_q, seqlen_k)
        torch.testing.assert_close(function(q, k, bias), call(q, k, bias))
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1, "a new shape compiled anew"


def test_case_105_other_shapes_after_the_first(backend: str) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(x, x, x, backend=backend)

    function = compiled(call)
    for shape in ((8, 90, 20, 64), (1, 153, 24, 128), (16, 1, 24, 128)):
        for dtype in (torch.float16, BF16):
            x = torch.randn(shape, dtype=dtype)
            out = function(x)
            assert bool(out.isfinite().all())
            torch.testing.assert_close(out, call(x))


def test_case_47_a_transposed_bias_under_compile(backend: str) -> None:
    def call(q: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, q, q, bias=bias, backend=backend)

    function, q, bias = compiled(call), torch.randn(2, 24, 4, 8), torch.randn(2, 1, 24, 24)
    for one in (bias, bias.transpose(-1, -2).contiguous().transpose(-1, -2)):
        torch.testing.assert_close(function(q, one), call(q, bias))


def test_case_107_max_seqlen_as_a_fresh_tensor_each_step(backend: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        return tilewise.attention_varlen(
            q, q, q, cu_seqlens_q=cu, max_seqlen=cu.diff().max(), causal=True, backend=backend
        )

    function, q, cu = (
        torch.compile(call, fullgraph=True, backend=counter),
        torch.randn(12, 2, 8, requires_grad=True),
        offsets((5, 7)),
    )
    by_int = tilewise.attention_varlen(q, q, q, cu_seqlens_q=cu, max_seqlen=7, causal=True, backend=backend)
    for _ in range(5):
        out = function(q, cu)
        torch.testing.assert_close(out, by_int)
        torch.autograd.grad(out.sum(), q)
    assert counter.frame_count == 1


@pytest.mark.parametrize("values", [torch.zeros, torch.randn])
def test_case_109_unusual_strides_in_a_compiled_backward(values: Callable, backend: str) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, v, backend=backend)

    function = compiled(call, dynamic=True)
    for length in (200, 131, 64):
        q = values(1, length, 1, 64).requires_grad_()
        k = values(length, 64).as_strided((1, length, 1, 64), (7, 64, 13, 1)).detach().requires_grad_()
        v = values(1, 1, length, 64).transpose(1, 2).detach().requires_grad_()
        dout = values(length, 64).as_strided((1, length, 1, 64), (1, 64, 1, 1))
        grads = [torch.autograd.grad(f(q, k, v), (q, k, v), dout) for f in (function, call)]
        torch.testing.assert_close(grads[0], grads[1])
        if values is torch.zeros:
            assert not any(grad.any() for grad in grads[0])


def test_jvp_and_double_backward_inside_a_compiled_function(backend: str) -> None:
    q, k, v = (torch.randn(1, 5, 2, 4) for _ in range(3))

    def along(q: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda x: tilewise.attention(x, k, v, causal=True, backend=backend), (q,), (t,))[1]

    t = torch.randn_like(q)
    torch.testing.assert_close(compiled(along)(q, t), along(q, t))


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a compiler")
@pytest.mark.slow
def test_inductor_compiles_forward_and_backward(backend: str) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q * 2, k.relu(), v, causal=True, backend=backend).sin()

    tensors = [torch.randn(2, 20, 4, 16, requires_grad=True) for _ in range(3)]
    out, expected = compiled(call, "inductor")(*tensors), call(*tensors)
    torch.testing.assert_close(out, expected)
    got, want = (torch.autograd.grad(o.square().sum(), tensors) for o in (out, expected))
    torch.testing.assert_close(got, want)


class Attention(torch.nn.Module):
    """A small layer around the call."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 3 * 32, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        return tilewise.attention(q, k, v, causal=True).flatten(-2)


def test_case_161_export_with_a_dynamic_length() -> None:
    layer = Attention().eval()
    program = torch.export.export(
        layer, (torch.randn(2, 16, 32),), dynamic_shapes=({1: torch.export.Dim("n", min=2, max=512)},)
    )
    assert any("tilewise.forward" in str(node.target) for node in program.graph.nodes)
    for length in (16, 5, 100):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(program.module()(x), layer(x))


def test_case_161_meta_tensors_have_the_right_form(backend: str) -> None:
    q = torch.empty(2, 128, 8, 64, device="meta", dtype=BF16)
    k, v = torch.empty(2, 96, 2, 64, device="meta", dtype=BF16), torch.empty(2, 96, 2, 32, device="meta", dtype=BF16)
    out, lse = tilewise.attention_with_lse(q, k, v, causal=True, backend=backend)
    real = tilewise.attention_with_lse(*(torch.zeros(t.shape, dtype=BF16) for t in (q, k, v)), causal=True)
    for meta, one in zip((out, lse), real, strict=True):
        assert meta.device.type == "meta"
        assert (meta.shape, meta.stride(), meta.dtype) == (one.shape, one.stride(), one.dtype)
    layer = Attention(device="meta")
    assert layer(torch.empty(2, 9, 32, device="meta")).shape == (2, 9, 32)
    with pytest.raises(tilewise.InvalidInput, match="headdim"):
        tilewise.attention(q, k[..., :32], v, backend=backend)


def test_autocast_casts_and_leaves_fp64_alone(backend: str) -> None:
    x, y = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8, dtype=torch.float64)
    with torch.autocast(here(), dtype=BF16):
        assert tilewise.attention(x, x, x, backend=backend).dtype == BF16
        assert tilewise.attention(y, y, y, backend=backend).dtype == torch.float64
    with torch.autocast(here(), dtype=torch.float16):
        assert tilewise.attention(x, x, x, backend=backend).dtype == torch.float16


def test_autocast_under_compile(backend: str) -> None:
    place = here()

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(place, dtype=BF16):
            return tilewise.attention(x, x, x, causal=True, backend=backend)

    x = torch.randn(1, 9, 2, 8, requires_grad=True)
    out = compiled(call)(x)
    assert out.dtype == BF16
    torch.testing.assert_close(out, call(x))
    assert torch.autograd.grad(out.float().sum(), x)[0].dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("seed", [None, 7])
def test_checkpointing_recomputes_the_same_dropout(use_reentrant: bool, seed: int | None, backend: str) -> None:
    x = torch.randn(2, 20, 2, 8, requires_grad=True)
    dout = torch.randn(2, 20, 2, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(x, x, x, dropout_p=0.5, dropout_seed=seed, causal=True, backend=backend)

    torch.manual_seed(3)
    plain = call(x)
    (expected,) = torch.autograd.grad(plain, x, dout)
    torch.manual_seed(3)
    saved = checkpoint(call, x, use_reentrant=use_reentrant)
    torch.manual_seed(99)
    assert torch.equal(saved, plain)
    saved.backward(dout)
    torch.testing.assert_close(x.grad, expected)


def operator_arguments(features: tuple[str, ...], dtype: torch.dtype, backend: str) -> tuple:
    sample = make(
        Spec(features=features, dtype=dtype, seqlen_q=5, seqlen_k=7, headdim=4, headdim_v=3, requires_grad="all")
    )
    return tuple(arguments.dense_arguments(sample.q, sample.k, sample.v, **sample.options, backend=backend))


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    "features", [(), ("causal", "bias", "sink"), ("mask", "alibi", "softcap"), ("dropout",)], ids="+".join
)
@pytest.mark.parametrize("name", ["forward", "backward", "jvp", "second"])
@pytest.mark.rooms("cpu", "auto-cuda")
def test_opcheck_passes(name: str, features: tuple[str, ...], backend: str) -> None:
    # fp32 on a GPU, which kernels run there
    flat = operator_arguments(features, torch.float64 if here() == "cpu" else torch.float32, backend)
    out, lse = (t.detach() for t in torch.ops.tilewise.forward.default(*flat))
    named = arguments.Arguments(*flat)._asdict()
    tangents = [
        None if named[n] is None else torch.randn_like(named[n])
        for n in ("q", "k", "v", "bias", "alibi_slopes", "sink")
    ]
    leading = {
        "forward": (),
        "backward": (torch.randn_like(out), torch.randn_like(lse), out, lse),
        "jvp": (*tangents, out, lse),
        "second": (*tangents, torch.randn_like(out), torch.randn_like(lse), out, lse),
    }[name]
    checks = CHECKS
    if name == "second":  # third derivatives are refused, so its own backward is not traced
        flat = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in flat)
    torch.library.opcheck(getattr(torch.ops.tilewise, name).default, (*leading, *flat), test_utils=checks)


def assert_lies_where_its_fake_says(operator: Callable, values: tuple) -> None:
    with FakeTensorMode() as mode:
        fakes = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in values))
    assert [t.stride() for t in operator(*values)] == [t.stride() for t in fakes], operator


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.rooms("reference", "cpu", "sdpa", "triton", "hopper")
def test_an_operators_results_lie_where_its_fake_puts_them(heads_first: bool, backend: str) -> None:
    """torch's kernel has the heads of lse innermost, and a graph reads every result by the strides of the fake."""
    dtype = usual_dtype(backend)
    leaves = [torch.randn(2, 6, 3, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else t for t in leaves)
    flat = tuple(arguments.dense_arguments(q, k, v, causal=True, backend=backend))
    state = torch.ops.tilewise.forward.default(*flat)
    given = {"forward": flat, "backward": (torch.randn_like(state[0]), None, *(t.detach() for t in state), *flat)}
    for name, values in given.items():
        assert_lies_where_its_fake_says(getattr(torch.ops.tilewise, name).default, values)


@pytest.mark.rooms("reference", "cpu", "hopper")
def test_an_fp8_operators_results_lie_where_its_fake_puts_them(backend: str) -> None:
    tensors = [torch.randn(2, 6, 3, 64).transpose(1, 2).contiguous().transpose(1, 2).to(descale.FP8) for _ in range(3)]
    values = (*[torch.ones(2, 3) for _ in range(3)], *arguments.dense_arguments(*tensors, causal=True, backend=backend))
    assert_lies_where_its_fake_says(torch.ops.tilewise.forward_fp8.default, values)


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.rooms("reference", "cpu", "sdpa", "triton", "hopper")
def test_a_compiled_function_gives_the_same_at_every_call(with_grad: bool, backend: str) -> None:
    """The first call may run as it is traced; the later ones run the graph."""
    dtype = usual_dtype(backend)
    q, k, v = (torch.randn(2, 6, 3, 16, dtype=dtype, requires_grad=with_grad) for _ in range(3))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tilewise.attention_with_lse(q, k, v, causal=True, backend=backend)

    function, eager = compiled(call), call(q, k, v)
    for _ in range(3):
        traced = function(q, k, v)
        torch.testing.assert_close(traced, eager)
        assert traced[1].is_contiguous()
        if with_grad:
            grads = [torch.autograd.grad(o.sum() + lse.sum(), (q, k, v)) for o, lse in (traced, call(q, k, v))]
            torch.testing.assert_close(grads[0], grads[1])


def test_use_backend_inside_a_compiled_function() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        with tilewise.use_backend("reference"):
            return tilewise.attention(x, x, x)

    x = torch.randn(1, 5, 2, 4)
    torch.testing.assert_close(compiled(call)(x), call(x))


def test_use_backend_around_a_compiled_function() -> None:
    x = torch.randn(1, 5, 2, 4)

    def scenario() -> None:
        call = compiled(lambda x: tilewise.attention(x, x, x, softcap=1.0))
        out = call(x)
        with tilewise.use_backend("sdpa"), pytest.raises(tilewise.UnsupportedProblem, match="sdpa"):
            call(x)
        assert torch.equal(call(x), out)

    # a thread that has never named a backend
    with ThreadPoolExecutor(1) as thread:
        thread.submit(scenario).result()
