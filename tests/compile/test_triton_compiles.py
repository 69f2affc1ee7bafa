"""What the tile tables can choose compiles for every device named, inside its shared memory, without a GPU.

By default a covering subset runs; TILEWISE_COMPILE=all compiles every feature for every device.
"""

from __future__ import annotations

import itertools
import os
import re

import pytest
import torch

from tests.compile.kernels import TARGETS, build, launches
from tests.compile.spills import MEASURED, disassembled, loops, lost_operands, serialised
from tilewise.backends.triton import tiles
from tilewise.backends.triton.arguments import Box
from tilewise.backends.triton.facts import INTERPRETED
from tilewise.problem import GRAD_NAMES

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window_left": 100, "window_right": 0, "causal": "top_left"},
    "softcap": {"softcap": 30.0},
    "dropout": {"dropout_p": 0.1, "dropout_seed": torch.zeros((), dtype=torch.int64)},
    "dropout_causal": {"dropout_p": 0.1, "dropout_seed": torch.zeros((), dtype=torch.int64), "causal": "bottom_right"},
    "bias": {"bias": torch.zeros(2, 2, 64, 96)},
    "bias_shared": {"bias": torch.zeros(1, 1, 64, 96)},
    "mask": {"mask": torch.ones(2, 1, 64, 96, dtype=torch.bool)},
    "bias_mask": {"bias": torch.zeros(2, 2, 64, 96), "mask": torch.ones(2, 1, 64, 96, dtype=torch.bool)},
    "bias_dropout": {
        "bias": torch.zeros(2, 2, 64, 96),
        "dropout_p": 0.1,
        "dropout_seed": torch.zeros((), dtype=torch.int64),
    },
    "alibi": {"alibi_slopes": torch.zeros(2), "sink": torch.zeros(2)},
}
HEADDIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (576, 512), (33, 33))
ALL = os.environ.get("TILEWISE_COMPILE") == "all"
# (arch, head dimensions, dtype, features): each device, each row of its tables, each feature at least once
CASES = [
    *[("sm_90", dims, torch.bfloat16, "causal") for dims in HEADDIMS],
    *[("sm_90", (64, 64), torch.bfloat16, features) for features in FEATURES if features != "causal"],
    *[
        ("sm_90", (256, 256), torch.bfloat16, features)
        for features in ("bias", "mask", "dropout", "bias_mask", "bias_dropout")
    ],
    ("sm_90", (128, 128), torch.float32, "plain"),
    ("sm_80", (128, 128), torch.float16, "causal"),
    ("sm_80", (256, 256), torch.bfloat16, "plain"),
    ("sm_86", (128, 128), torch.bfloat16, "causal"),
    ("sm_89", (64, 64), torch.bfloat16, "mask"),
    ("sm_100", (64, 64), torch.bfloat16, "plain"),
    ("sm_100", (128, 128), torch.bfloat16, "causal"),
    ("sm_120", (256, 256), torch.bfloat16, "causal"),
    ("gfx942", (128, 128), torch.bfloat16, "causal"),
    ("gfx942", (256, 256), torch.float16, "plain"),
    ("gfx950", (64, 64), torch.bfloat16, "window"),
]
if ALL:
    CASES = [
        (arch, dims, dtype, features)
        for arch in TARGETS
        for dims in HEADDIMS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for features in FEATURES
    ]


def tensors(headdims, dtype, expanded=False):
    """q, k and v; expanded ones have a stride of 0, which keeps a tile from TMA."""
    sides = ((64, headdims[0]), (96, headdims[0]), (96, headdims[1]))
    q, k, v = (torch.zeros(2, seqlen, 2, dim, dtype=dtype) for seqlen, dim in sides)
    return (q, *(t[:, :, :1].expand_as(t) for t in (k, v))) if expanded else (q, k, v)


def compiles_and_fits(arch, q, k, v, features):
    for backward in (False, True):
        for wanted in launches(arch, q, k, v, backward, **FEATURES[features]):
            compiled = build(wanted, arch)
            assert compiled.metadata.shared <= TARGETS[arch][1], wanted.kernel.__name__


@pytest.mark.parametrize(("arch", "headdims", "dtype", "features"), CASES, ids=str)
def test_every_launch_of_a_call_compiles_and_fits(arch, headdims, dtype, features):
    compiles_and_fits(arch, *tensors(headdims, dtype), features)


@pytest.mark.parametrize(("dtype", "features"), [(torch.float32, "causal"), (torch.bfloat16, "bias")], ids=str)
def test_kernels_that_share_a_rows_largest_score_round_scores_alike(dtype, features):
    """Where one fused the scale with the subtraction and another did not, p was off by the score's rounding."""
    for wanted in launches("sm_90", *tensors((64, 64), dtype), True, **FEATURES[features]):
        ptx = build(wanted, "sm_90").asm["ptx"]
        assert "mul.rn.f32" in ptx, wanted.kernel.__name__
        assert "mul.f32" not in ptx, wanted.kernel.__name__


# what the number of keys decides, with every feature, through TMA and without
KEYS = sorted({row.keys for row in tiles._FORWARD_90})
BY_KEYS = [
    *[(keys, (128, 128), features, False) for keys in KEYS for features in FEATURES],
    *[(keys, (128, 128), features, True) for keys in KEYS for features in ("plain", "causal")],
    *[(keys, (16, 128), "window", False) for keys in KEYS],
    *[(keys, (64, 64), "dropout_causal", False) for keys in KEYS],
]


@pytest.mark.parametrize(("keys", "headdims", "features", "expanded"), BY_KEYS, ids=str)
def test_forwards_of_few_and_many_keys_compile_and_fit(monkeypatch, keys, headdims, features, expanded):
    monkeypatch.setattr(tiles, "keys_of_a_query", lambda problem: keys)
    for wanted in launches("sm_90", *tensors(headdims, torch.bfloat16, expanded), False, **FEATURES[features]):
        assert build(wanted, "sm_90").metadata.shared <= TARGETS["sm_90"][1]


# gradients that come from a kernel of their own when nothing else is asked for
ALONE = [*((name, dim) for name in "kv" for dim in (64, 128, 576)), ("bias", 128), ("bias", 256), ("bias", 576)]


@pytest.mark.parametrize(("name", "headdim"), ALONE)
def test_one_gradient_alone_compiles_and_fits(name, headdim):
    options = FEATURES["bias_shared" if name == "bias" else "causal"]
    for wanted in launches("sm_90", *tensors((headdim, headdim), torch.bfloat16), True, (name,), **options):
        assert build(wanted, "sm_90").metadata.shared <= TARGETS["sm_90"][1], wanted.kernel.__name__


def test_dk_and_dv_alone_have_the_tiles_of_both_together():
    narrow = [row for row in tiles._KEYS_90 if row.dim <= tiles.PART]
    assert [row for row in tiles._KEYS_K_90 if row.dim <= tiles.PART] == narrow
    assert [row for row in tiles._KEYS_V_90 if row.dim <= tiles.PART] == narrow


def test_row_statistics_lie_where_the_copy_engine_may_write():
    """At multiples of 128 bytes of shared memory; three stages keep two of them, one after the other."""
    rows = [row for kernel in ("keys", "keys_k", "keys_v") for row in tiles._TABLES_90[kernel]]
    assert all(row.stages <= 2 for row in rows if row.block_m * torch.float32.itemsize % 128)


def test_every_row_for_an_sm_90_is_compiled_by_a_case(monkeypatch):
    chosen = set()
    choose = tiles.choose_row

    def record(kernel, *arguments):
        row = choose(kernel, *arguments)
        chosen.add((kernel, row))
        return row

    monkeypatch.setattr(tiles, "choose_row", record)
    for arch, headdims, dtype, features in CASES:
        for backward in (False, True):
            launches(arch, *tensors(headdims, dtype), backward, **FEATURES[features])
    for name, headdim in ALONE:
        options = FEATURES["bias_shared" if name == "bias" else "causal"]
        launches("sm_90", *tensors((headdim, headdim), torch.bfloat16), True, (name,), **options)
    for keys, headdims, features, expanded in BY_KEYS:
        monkeypatch.setattr(tiles, "keys_of_a_query", lambda problem, keys=keys: keys)
        launches("sm_90", *tensors(headdims, torch.bfloat16, expanded), False, **FEATURES[features])
    monkeypatch.undo()
    monkeypatch.setattr(tiles, "choose_row", record)
    costly = [(scores, band, (dim, dim), torch.bfloat16) for scores, band, dim in (c.values for c in costly_cases())]
    for scores, band, headdims, dtype in [*costly, *(case.values for case in other_cases())]:
        for names in (GRAD_NAMES, ("k",), ("v",), ("k", "bias")):
            for backward in (False, True):
                launches("sm_90", *tensors(headdims, dtype), backward, names, **options_of(scores, band, dtype))
    rows = {(kernel, row) for kernel, table in tiles._TABLES_90.items() for row in table}
    # splits_keys never asks for the one; column sums are those of dk, of "keys_k", also where only dv is asked for
    sums = {("keys_v", row) for row in tiles._KEYS_V_90 if any("column" in name for name in row.having)}
    assert {(kernel, row.dim) for kernel, row in rows - chosen - sums} == {("keys", 256)}


FORWARD, KEYS, QUERIES = "forward_kernel", "key_gradients_kernel", "query_gradients_kernel"
BANDS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window_left": 100, "window_right": 0},
    "unseen": {"window_left": 100, "window_right": 0, "causal": "top_left"},
    "top_left": {"causal": "top_left"},
}
PACKED = ("packed", "packed_apart", "packed_window", "packed_window_apart")  # "apart": keys have offsets of their own
BIAS = {"bias": torch.zeros(2, 2, 64, 96, dtype=torch.bfloat16)}
SCORES: dict[str, dict[str, object]] = {
    **{name: FEATURES[name] for name in ("softcap", "dropout", "alibi", "mask")},
    "segments": {f"segments_{side}": torch.zeros(2, n, dtype=torch.int32) for side, n in (("q", 64), ("k", 96))},
    "bias": BIAS,
    "bias_fp32": FEATURES["bias"],
}
# rows that start anywhere, and what several pairs share, whose gradients are sums of rows, of columns or of tiles
SHAPED = {"bias_ragged": torch.zeros(2, 2, 64, 97)[..., :96], "bias_shared": torch.zeros(1, 1, 64, 96)}
SHAPED |= {"bias_of_keys": torch.zeros(2, 2, 1, 96), "bias_of_queries": torch.zeros(2, 2, 64, 1)}
BIASES = {name: {"bias": bias.bfloat16()} for name, bias in SHAPED.items()}
BIASES |= {f"{name}_fp32": {"bias": bias} for name, bias in SHAPED.items()}
LISTED, ALTERNATIVES = {"mask", "segments"}, ({"mask", "segments"}, {"bias", "bias_fp32"})
# several at once, each in the band that takes most registers; tiles from lists know no band
TOGETHER = [
    names
    for several in (2, 3, 5)
    for names in itertools.combinations(SCORES, several)
    if not any(pair <= set(names) for pair in ALTERNATIVES)
]
COMBINED = [
    ("+".join(names), "plain" if LISTED & set(names) else "window", headdim)
    for names in TOGETHER
    for headdim in (64, 128, 256)
]
COMBINED += [("dropout+bias", "plain", headdim) for headdim in (64, 128, 256)]
COMBINED += [(scores, "window", headdim) for scores in ("dropout", "bias", "bias_fp32") for headdim in (64, 128, 256)]
UNSEEN = ["softcap", "dropout", "alibi", "bias", "bias_fp32"]
UNSEEN += ["+".join(names) for names in TOGETHER if not LISTED & set(names)]
CORNER = [*UNSEEN[:5], "dropout+bias", "softcap+bias", "alibi+bias"]
UNSEEN += [f"softcap+dropout+alibi+{bias}" for bias in ("bias", "bias_fp32")]
QUICK_SCORES = [
    ("bias", "plain", 128), ("bias", "causal", 128), ("bias_fp32", "causal", 128), ("dropout", "causal", 128),
    ("bias", "causal", 64), ("alibi", "causal", 64), ("softcap", "causal", 64), ("bias", "window", 256),
    ("dropout+bias", "plain", 64), ("dropout", "unseen", 128), ("bias", "unseen", 64),
    ("dropout+segments", "plain", 128),
]  # fmt: skip


def options_of(scores, band, dtype=torch.bfloat16):
    """The options of scores whose names stand between plus signs, inside a band; a bias of 16 bits has ``dtype``."""
    options = {name: value for one in scores.split("+") if one for name, value in (SCORES | BIASES)[one].items()}
    if "bias" in options and options["bias"].dtype == torch.bfloat16:
        options["bias"] = options["bias"].to(dtype)
    return options | BANDS[band]


def main_loops(q, k, v, options):
    """(kernel, what it became, its first loop, which is over inner tiles), with a gradient of lse and without."""
    found, seen = [], set()
    for backward, has_dlse in ((False, False), (True, False), (True, True)):
        for wanted in launches("sm_90", q, k, v, backward, has_dlse=has_dlse, **options):
            if repr(wanted) not in seen:
                seen.add(repr(wanted))
                compiled = build(wanted, "sm_90")
                assert compiled.metadata.shared <= TARGETS["sm_90"][1], wanted.kernel.__name__
                assert not lost_operands(disassembled(compiled.asm["cubin"])), wanted
                found += [(wanted.kernel.__name__, compiled, loop) for loop in loops(compiled)[:1]]
    return found


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("features", [*BANDS, *PACKED])
def test_the_main_loops_do_not_spill_and_do_not_wait_after_every_product(headdim, features):
    q, k, v = tensors((headdim, headdim), torch.bfloat16)
    options = BANDS.get(features, {})
    if features in PACKED:
        q, k, v = (torch.zeros(128, 2, headdim, dtype=torch.bfloat16) for _ in range(3))
        offsets = torch.tensor([0, 64, 128], dtype=torch.int32)
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets.clone() if "apart" in features else offsets,
                   "max_seqlen_q": 64, "max_seqlen_k": 64, **BANDS["window" if "window" in features else "causal"]}
    for kernel, compiled, loop in main_loops(q, k, v, options):
        assert loop.products >= 8, kernel
        if MEASURED:
            assert not serialised(compiled), kernel
            assert loop.spills == 0, kernel


def costly_cases():
    """Every kind of scores that cost registers; those that only repeat what a quick one shows are slow."""
    every = [(scores, band, headdim) for scores in SCORES for band in ("plain", "causal") for headdim in (64, 128, 256)]
    unseen = [(scores, "unseen", headdim) for scores in UNSEEN for headdim in (64, 128, 256)]
    corner = [(scores, "top_left", headdim) for scores in CORNER for headdim in (64, 128, 256)]
    ragged = [("bias_ragged", band, headdim) for band in BANDS for headdim in (64, 128, 256)]
    for case in (*every, *unseen, *corner, *ragged, *COMBINED):
        yield pytest.param(*case, marks=[] if case in QUICK_SCORES else [pytest.mark.slow])


@pytest.mark.parametrize(("scores", "band", "headdim"), list(costly_cases()))
def test_the_main_loops_do_not_spill_where_scores_cost_registers(scores, band, headdim):
    q, k, v = tensors((headdim, headdim), torch.bfloat16)
    for kernel, compiled, loop in main_loops(q, k, v, options_of(scores, band)):
        if MEASURED:
            assert loop.spills == 0, kernel
            assert not serialised(compiled), kernel


UNEQUAL = ((192, 128), (128, 64), (64, 128), (96, 64), (128, 256))
QUICK_OTHERS = [
    ("dropout", "window", (128, 128), torch.float16), ("bias_of_keys", "causal", (128, 128), torch.bfloat16),
]  # fmt: skip


def other_cases():
    """Types, numbers of channels and shapes of biases that the cases before have none of."""
    equal = [(headdim, headdim) for headdim in (64, 128, 256)]
    bands = ("plain", "causal", "window", "unseen")
    alone = ["", "softcap", "alibi", "bias", "bias_fp32", "dropout", "dropout+bias", "softcap+alibi"]
    pairs = ["+".join(names) for names in TOGETHER if len(names) == 2]
    halves = [(scores, band) for scores in alone for band in bands]
    halves += [(scores, band) for scores in ("mask", "segments") for band in bands[:2]]
    halves += [(scores, "window") for scores in pairs if not LISTED & set(scores.split("+")) and scores not in alone]
    halves += [(f"dropout+{scores}", "plain") for scores in ("mask", "segments")] + [("softcap", "unseen")]
    cases = [(*case, dims, torch.float16) for case in halves for dims in equal]
    cases += [(f"{scores}+mask", "plain", dims, torch.float16) for scores in ("softcap", "alibi") for dims in equal[1:]]
    cases += [("mask+bias", "plain", dims, torch.float16) for dims in equal[1:]]
    unequal = [(scores, band) for scores in ("", "bias", "dropout") for band in bands[:3]]
    unequal += [("mask", band) for band in bands[:2]]
    cases += [(*case, dims, torch.bfloat16) for case in unequal for dims in UNEQUAL]
    shaped = [(name, band) for name in BIASES if "_of_" in name for band in BANDS]
    shaped += [(name, band) for name in BIASES if "_shared" in name for band in bands[:2]]
    cases += [(*case, dims, torch.bfloat16) for case in shaped for dims in equal]
    for case in cases:
        yield pytest.param(*case, marks=[] if case in QUICK_OTHERS else [pytest.mark.slow])


@pytest.mark.parametrize(("scores", "band", "headdims", "dtype"), list(other_cases()), ids=str)
def test_the_main_loops_of_other_types_channels_and_biases_do_not_spill(scores, band, headdims, dtype):
    for kernel, compiled, loop in main_loops(*tensors(headdims, dtype), options_of(scores, band, dtype)):
        if MEASURED:
            assert loop.spills == 0, kernel
            assert not serialised(compiled), kernel


@pytest.mark.parametrize("band", ["plain", "causal"])
def test_a_quads_random_words_are_drawn_once(band):
    """A layout traced back through joins and reshapes had eight threads draw each of them in a forward with a band."""
    q, k, v = tensors((64, 64), torch.bfloat16)
    (wanted,) = launches("sm_90", q, k, v, False, **{**SCORES["dropout"], **BANDS[band]})
    tile, compiled = wanted.arguments[-1], build(wanted, "sm_90")
    quads = (tile.block_m, tile.block_n // 4)
    products = re.findall(rf"tt.mulhiui .*tensor<{quads[0]}x{quads[1]}xi32", compiled.asm["ttgir"])
    of_a_thread = quads[0] * quads[1] // (32 * wanted.config.warps)
    assert products
    assert compiled.asm["ptx"].count("mul.hi.u32") < 1.5 * len(products) * of_a_thread


LOST = [(scores, headdim) for headdim in (20, 32, 48, 64) for scores in ("softcap", "alibi", "scale")]
LOST += [(scores, 64) for scores in ("dropout", "mask", "bias+mask")]


@pytest.mark.parametrize(("scores", "headdim"), LOST)
def test_products_keep_the_queries_where_they_have_as_many_registers_as_probabilities(scores, headdim):
    options = {"softmax_scale": -0.3} if scores == "scale" else options_of(scores, "plain")
    q, k, v = tensors((headdim, headdim), torch.bfloat16)
    for band in ("causal", "window"):
        found = launches("sm_90", q, k, v, False, **{**options, **BANDS[band]})
        (wanted,) = [launch for launch in found if launch.kernel.__name__ == FORWARD]
        assert not lost_operands(disassembled(build(wanted, "sm_90").asm["cubin"]))


@pytest.mark.parametrize("rule", [None, "mask", "segments"])
def test_lse_of_tiles_from_lists_begins_with_the_first_query(rule):
    """Those tiles count from there, and the copy engine takes lse from every fourth number on only; others move it."""
    q, k, v = (torch.zeros(1, n, 2, 64, dtype=torch.bfloat16) for n in (510, 385, 385))
    segments = {"segments_q": q[..., 0, 0].int(), "segments_k": k[..., 0, 0].int()}
    options = {None: {}, "mask": {"mask": torch.ones(1, 1, 1, 385, dtype=torch.bool)}, "segments": segments}[rule]
    wanted = launches("sm_90", q, k, v, True, causal="bottom_right", **options)
    boxes = [box for one in wanted for box in one.arguments if isinstance(box, Box) and box.base == torch.float32]
    assert {box.shape for box in boxes} == {(2 * (576 if rule is None else 512),)}


LEADS, WAITS = "griddepcontrol.launch_dependents", "griddepcontrol.wait"


@pytest.mark.parametrize(
    ("headdim", "options", "expected"),
    [
        (128, {}, {"delta_kernel": (), KEYS: (LEADS,), QUERIES: (WAITS,)}),
        (128, {"causal": "bottom_right"}, {QUERIES: (), KEYS: ()}),
        (256, {}, {QUERIES: (), KEYS: (LEADS, WAITS)}),  # the first of two leads, the second waits
    ],
)
def test_launches_that_begin_beside_the_one_before(headdim, options, expected):
    """On sm_90 alone; what begins early ends late."""
    for arch in ("sm_90", "sm_80"):
        q, k, v = (torch.zeros(1, 4096, 20, headdim, dtype=torch.bfloat16) for _ in range(3))
        found: dict[str, tuple[str, ...]] = {}
        for wanted in launches(arch, q, k, v, True, names=("q", "k", "v"), has_dlse=False, **options):
            ptx, name = build(wanted, arch).asm["ptx"], wanted.kernel.__name__
            found[name] = (*found.get(name, ()), *[word for word in (LEADS, WAITS) if word in ptx])
        assert found == (expected if arch == "sm_90" else {QUERIES: (), KEYS: ()})


LONG = ({}, {"causal": "bottom_right"}, {"window_left": 1024, "window_right": 0})


def test_long_rows_overlap_a_product_with_the_next_softmax():
    q, k, v = (torch.zeros(1, 4096, 2, 128, dtype=torch.bfloat16) for _ in range(3))
    for options in LONG:
        (wanted,) = launches("sm_90", q, k, v, False, **options)
        compiled = build(wanted, "sm_90")
        if MEASURED:
            assert not serialised(compiled)
            assert loops(compiled)[0].spills == 0
        scores, product = compiled.asm["ttgir"].split("ttng.warp_group_dot ")[1:3]  # of the main loop, which is first
        assert "pendings = 0" in scores
        assert "scf.yield" in product.split("ttng.warp_group_dot_wait")[0]  # it is still under way in the next turn


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_a_warp_whose_maxima_stay_leaves_the_accumulator_alone(headdim):
    """PTX counts on where a thread's elements are: of the two rows that it holds in turns, two columns at a time."""
    q, k, v = (torch.zeros(1, 4096, 2, headdim, dtype=torch.bfloat16) for _ in range(3))
    for options in LONG:
        (wanted,) = launches("sm_90", q, k, v, False, **options)
        tile = wanted.arguments[-1]
        compiled = build(wanted, "sm_90")
        assert tile.lazy
        assert tile.block_m == 16 * wanted.config.warps
        warps = set(re.findall(r"#ttg.nvidia_mma<{.*?warpsPerCTA = (\[.*?\])", compiled.asm["ttgir"]))
        assert warps == {f"[{wanted.config.warps}, 1]"}
        written = r'elementwise_inline_asm "[^"]*%s[^"]*".*-> tensor<\d+x(\d+)xf32, (#\w+)>'
        for label, size in (("STILL", tile.block_dv), ("STEADY", tile.block_n), ("WHOLE", tile.block_n)):
            found = re.findall(written % label, compiled.asm["ttgir"])
            assert found or (label == "WHOLE" and not options)  # without a band nothing is masked
            for columns, layout in found:
                assert f"{layout} = #ttg.nvidia_mma<" in compiled.asm["ttgir"]
                assert int(columns) == size
        main = compiled.asm["ttgir"].split("scf.for")[1].split("tt.num_stages")[0]
        assert main.count("tt.reduce") >= 2
        assert not re.search(r'"tt.reduce"[^\n]*axis = 1 : i32}> \({[^}]*maxnumf', main)  # no thread asks another
