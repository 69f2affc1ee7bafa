"""What must hold whatever the numbers: it catches what two wrong codes agree on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tests.rooms import ROOMS, usual_dtype
from tilewise.testing import FEATURES, Spec, compatible, make

FP64 = torch.float64
pytestmark = pytest.mark.rooms(*(name for name, room in ROOMS.items() if FP64 in room.dtypes))
LENGTH = st.integers(1, 24)
SEED = st.integers(0, 10**6)


def features_of(backend: str, without: tuple[str, ...] = ()) -> st.SearchStrategy[tuple[str, ...]]:
    names = sorted(ROOMS[backend].features - {"scale", "dropout", *without})

    def may_run(chosen: list[str]) -> bool:
        # torch's kernel takes one tensor for mask and bias: no broadcast sum larger than both
        crossed = {"mask", "padding"} & set(chosen) and {"bias_shared", "bias_rows"} & set(chosen)
        return compatible(chosen) and not (backend == "sdpa" and crossed)

    return st.lists(st.sampled_from(names), max_size=3, unique=True).filter(may_run).map(tuple)


def sample(data: st.DataObject, backend: str, without: tuple[str, ...] = (), **sizes: object):
    spec = Spec(
        seqlen_q=data.draw(LENGTH), seqlen_k=data.draw(LENGTH), headdim=8, headdim_v=8, dtype=FP64,
        features=data.draw(features_of(backend, without)), **sizes,
    )  # fmt: skip
    return make(spec, data.draw(SEED))


def call(one, backend: str, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
    given_ = {"q": one.q, "k": one.k, "v": one.v, **one.options, **changes}
    return tilewise.attention_with_lse(**given_, backend=backend)


@given(st.data())
def test_rows_of_p_sum_to_one_or_are_empty(backend: str, data: st.DataObject) -> None:
    one = sample(data, backend, without=("sink", "sink_batch"))
    out, lse = call(one, backend, v=torch.ones_like(one.v))
    empty = (lse == -torch.inf).transpose(1, 2)[..., None].expand_as(out)
    torch.testing.assert_close(out, (~empty).to(FP64))


@given(st.data())
def test_out_is_a_mean_of_the_values(backend: str, data: st.DataObject) -> None:
    one = sample(data, backend)
    out, _ = call(one, backend)
    lowest = one.v.amin(1, keepdim=True).repeat_interleave(2, 2).clamp(max=0)
    highest = one.v.amax(1, keepdim=True).repeat_interleave(2, 2).clamp(min=0)
    assert bool((out >= lowest - 1e-12).all())
    assert bool((out <= highest + 1e-12).all())


@given(st.data(), st.floats(-50, 50))
def test_a_shift_of_every_score_moves_lse_alone(backend: str, data: st.DataObject, shift: float) -> None:
    one = sample(data, backend, without=("bias", "bias_shared", "bias_rows", "sink", "sink_batch"))
    out, lse = call(one, backend)
    shifted, moved = call(one, backend, bias=torch.full((1, 1, 1, 1), shift, dtype=FP64))
    torch.testing.assert_close(shifted, out, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(moved, lse + shift, atol=1e-10, rtol=1e-10)


@given(st.data())
def test_keys_may_be_permuted_with_their_values(backend: str, data: st.DataObject) -> None:
    one = sample(
        data, backend, without=("causal", "top_left", "window", "window_left", "window_right", "alibi", "alibi_batch")
    )
    order = torch.randperm(one.spec.seqlen_k)
    changes: dict = {"k": one.k[:, order], "v": one.v[:, order]}
    for name in ("bias", "mask"):
        tensor = one.options.get(name)
        if tensor is not None and tensor.shape[-1] > 1:
            changes[name] = tensor[..., order]
    if "segments" in one.options:
        changes["segments"] = (one.options["segments"][0], one.options["segments"][1][:, order])
    torch.testing.assert_close(call(one, backend, **changes), call(one, backend))


@given(st.data())
def test_queries_heads_and_batch_items_do_not_know_each_other(backend: str, data: st.DataObject) -> None:
    one = sample(
        data, backend, without=tuple(set(FEATURES) - {"softcap", "bias_shared"}), batch=3, nheads=4, nheads_k=2
    )
    out, lse = call(one, backend)
    item, row = data.draw(st.integers(0, 2)), data.draw(st.integers(0, one.spec.seqlen_q - 1))
    alone = call(
        one, backend, q=one.q[item : item + 1, row : row + 1], k=one.k[item : item + 1], v=one.v[item : item + 1]
    )
    torch.testing.assert_close(alone[0][0, 0], out[item, row])
    torch.testing.assert_close(alone[1][0, :, 0], lse[item, :, row])


@given(st.data())
def test_the_keys_may_be_split_and_merged_anywhere(backend: str, data: st.DataObject) -> None:
    one = sample(data, backend, without=tuple(set(FEATURES) - {"mask", "padding", "bias", "softcap"}))
    cut = data.draw(st.integers(0, one.spec.seqlen_k))
    parts = []
    for keys in (slice(0, cut), slice(cut, None)):
        changes = {"k": one.k[:, keys], "v": one.v[:, keys]}
        changes |= {name: one.options[name][..., keys] for name in ("bias", "mask") if name in one.options}
        parts.append(call(one, backend, **changes))
    merged = tilewise.merge_states(*parts[0], *parts[1])
    torch.testing.assert_close(merged, call(one, backend))


@settings(max_examples=30)
@given(st.data())
def test_tiles_of_any_size_give_the_same(data: st.DataObject) -> None:
    from tilewise.backends.cpu.tiles import Tiling

    features = data.draw(st.lists(st.sampled_from(sorted(FEATURES)), max_size=4, unique=True).filter(compatible))
    sizes = {"seqlen_q": data.draw(LENGTH), "seqlen_k": data.draw(LENGTH), "headdim": 4, "headdim_v": 6}
    one = make(Spec(dtype=FP64, features=tuple(features), requires_grad="all", **sizes), data.draw(SEED))
    tiling = Tiling(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5)))

    def everything() -> list[torch.Tensor]:
        state = call(one, "cpu")
        sent = (one.dout, one.dlse)
        return [*state, *torch.autograd.grad(state, list(one.differentiable().values()), sent)]

    plain = everything()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tiling, "of", staticmethod(lambda problem: tiling))
        tiled = everything()
    torch.testing.assert_close(tiled, plain, atol=1e-9, rtol=1e-9)


@given(st.data())
def test_all_rooms_drop_the_same_pairs(data: st.DataObject) -> None:
    sizes = {"seqlen_q": data.draw(LENGTH), "seqlen_k": data.draw(LENGTH), "headdim": 4, "headdim_v": 4}
    one = make(Spec(dtype=FP64, features=("dropout",), requires_grad="all", **sizes))
    seed, share = data.draw(st.integers(-(2**63), 2**64 - 1)), data.draw(st.floats(0.05, 0.95))
    states = [call(one, name, dropout_seed=seed, dropout_p=share) for name in ("reference", "cpu")]
    torch.testing.assert_close(states[0], states[1])
    grads = [torch.autograd.grad(state, (one.q, one.k, one.v), (one.dout, one.dlse)) for state in states]
    torch.testing.assert_close(grads[0], grads[1])
    _, undropped = call(one, "cpu", dropout_p=0.0)
    torch.testing.assert_close(states[1][1], undropped)


@pytest.mark.rooms(*ROOMS)
@pytest.mark.parametrize(
    "features", [("causal",), ("window", "sink"), ("mask", "bias"), ("segments", "alibi")], ids="+".join
)
def test_a_query_block_changes_nothing_above_it(features: tuple[str, ...], backend: str) -> None:
    """A loss on some rows leaves the gradient of the others at exactly zero."""
    if not set(features) <= ROOMS[backend].features:
        with pytest.raises(tilewise.UnsupportedProblem):
            call(make(Spec(features=features)), backend)
        return
    dtype = usual_dtype(backend)
    one = make(Spec(features=features, requires_grad=("q", "k", "v"), seqlen_q=20, seqlen_k=20, dtype=dtype))
    out, _ = call(one, backend)
    dq, _, dv = torch.autograd.grad(out[:, 7:9].sum(), (one.q, one.k, one.v))
    assert not dq[:, :7].any()
    assert not dq[:, 9:].any()
    if features == ("causal",):
        assert not dv[:, 9:].any()
