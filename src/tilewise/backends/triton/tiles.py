"""Tile tables: the size of a tile, its warps and pipeline depth, by head dimension, element size and kind of device.

Rows are looked up by the larger head dimension; the first row whose ``dim`` reaches it is taken, of those for so few
keys and, where they ask for that, bare scores or some that cost registers. A row's reason says what decided it: a
measurement, or the shared memory and registers that a device has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise import masks
from tilewise.backends.triton.arguments import Config, Tile
from tilewise.backends.triton.facts import INTERPRETED, bias_kind
from tilewise.device import DeviceFacts
from tilewise.problem import SMALLEST_SCALE, Problem

MAX_RESIDENT = 256  # beyond it a tile would not fit, and channels are worked through in parts of PART
PART = 128


class Row(NamedTuple):
    """A tile for head dimensions up to ``dim``."""

    dim: int
    block_m: int
    block_n: int
    warps: int
    stages: int
    reason: str
    registers: int | None = None  # at most for each thread, so that one more block fits on a multiprocessor
    joint: bool = False  # see Tile
    overlap: bool = False
    held: bool = False
    parked: bool = False
    lazy: bool = False
    early: int = 4
    keys: int = 0  # only for problems whose queries see at least so many keys on average
    cube: bool = False  # see Tile
    bare: bool = False  # only where nothing but a band decides about a score: else the registers do not suffice
    having: tuple[str, ...] = ()  # only for problems that have one of these, see ``costly``


class Shape(NamedTuple):
    """What a kernel runs with: its compile-time tile, its warps and registers."""

    tile: Tile
    config: Config


Table = tuple[Row, ...]

# H200, bf16, TFLOP/s of the kernel alone, medians (2026-11-30); 1k is 16 x 1024, 4k 4 x 4096, 16k 1 x 16384, c causal.
# A row's figures are of one run, its partners' too. Four warps and 64 rows leave room for two blocks or more on a
# multiprocessor, whose softmax and products then overlap by themselves; eight warps march in step at every barrier.
# Times in ms are of 1 x 4096 with 16 heads of 128 channels, 32 of 64 or 8 of 256.
_FORWARD_90: Table = (
    Row(64, 64, 32, 4, 2, "three kinds of scores at once: no spills", joint=True, having=("crowded",)),
    Row(64, 64, 64, 4, 3, "1 x 4096 c 0.494 ms; 168 registers 0.533, lazy too 0.549; 64x32 and 168 registers 0.566",
        joint=True, keys=1000, having=("banded dropout",)),
    Row(64, 64, 64, 4, 3, "16 x 1024 c 0.538 ms, 1 x 4096 0.925; as the row before 0.562 and 0.967; lazy 1 x 4096"
        " 0.969", registers=168, joint=True, having=("dropout",)),
    Row(64, 64, 32, 4, 3, "4k 0.556 ms; 64x64 and 168 registers 0.682, 128 registers 0.916 with 16 spills a turn;"
        " rows of a bias that start anywhere 36 to 45", registers=128, joint=True, lazy=True,
        having=("fp32 bias", "ragged bias")),
    Row(64, 64, 64, 4, 3, "in 128 registers 45 spills a turn, in 168 36", joint=True, lazy=True,
        having=("dense flat bias",)),
    Row(64, 64, 64, 4, 3, "4k 0.316 ms with three segments, 0.545 with a bias and a mask for keys; 128 registers 0.338"
        " and 0.604 with 10 and 14 spills a turn, not lazy 0.371; 64x32 and 128 registers 0.337 and 0.625",
        registers=168, joint=True, lazy=True, having=("combined", "segments")),
    Row(64, 64, 64, 4, 3, "(1, 16384, 32, 64), windows of 1024 and 128 0.339 and 0.113 ms; with joint loads 0.355 and"
        " 0.116, and a spill a turn; with 136 registers too, three blocks resident, 0.382 and 0.128; joint without cube"
        " 0.342 and 0.115", registers=128, lazy=True, cube=True, bare=True, having=("window",)),
    Row(64, 64, 64, 4, 3, "1k 429, c 289, 16k 453, four blocks resident; three 401/265/437; 64x128 372/217/437; 128x64"
        " 391/233/425; 8 warps and 128x64 396 where this has 437; joint loads 1k c 332, 16k c 472, else 324/466; lazy"
        " 1k 412, c 346, 16k 474, c 471, else 405/339/458/448; cube 1k and 1k c 3 % faster, 16k c 1 %; quick steps"
        " 16k c 7 %, 1k 5 %", registers=128, joint=True, lazy=True, cube=True),
    Row(128, 64, 32, 4, 2, "three kinds of scores at once: no spills", having=("crowded",)),
    Row(128, 64, 32, 4, 3, "4k 0.658 ms; without overlap 0.672, 64x64 0.710, with overlap 0.969, all waited for 0.868",
        overlap=True, joint=True, having=("biased dropout",)),
    Row(128, 64, 64, 4, 3, "1 x 4096 0.545 ms, c 0.280, 16 x 1024 c 0.338, 16 x 512 0.164; lazy too 0.612, 0.288,"
        " 0.343; 64x32 c 0.306, 0.361, 0.194; without overlap 16 x 512 0.159", overlap=True, joint=True,
        having=("dropout",)),
    Row(128, 64, 64, 4, 3, "overlap, joint loads and lazy: 1k 485, 4k 549, c 560, 16k 561, c 570; without joint 480"
        "/530/557/555/562; only overlap 455/488/518/506/498, where joint alone had 9 % less at 16k; 64x32 and overlap"
        " 491/516/524/512/507; 8 warps, 128x64 and 128x128 16k 461 and 464 where overlap had 549; with cube the"
        " assembler orders the loop otherwise: 16k c and 4k c 4 % slower, 16k and 4k 2 %; quick steps 16k 6 %,"
        " 1k 2 %, 16k c 1 % faster, with early 4 0, 0 and 1 %, with 8 4, 2 and 1 %", overlap=True, joint=True,
        lazy=True, early=16, keys=1000),
    Row(128, 64, 32, 4, 3, "three blocks resident: window of 1024 466; as the next row 462, as the one before 458;"
        " overlap alone, four stages 414, and lazy too 459; cube 2 to 3 % faster, quick steps 6.5 %, with early"
        " 8 5 %, 16 2.5 %", registers=168, overlap=True, joint=True, lazy=True, cube=True, keys=700, bare=True),
    Row(128, 64, 32, 4, 4, "three blocks resident: 1k c 390; with overlap instead of joint loads 381; 64x64, overlap"
        " and joint loads 364; cube 1k c 1 %, windows of 128 and 512 4 and 2 % faster, quick steps 4, 1 and 5 %",
        registers=168, joint=True, lazy=True, cube=True, bare=True),
    Row(128, 64, 64, 4, 3, "for scores that cost registers: 1k c 376, window of 1024 435 with joint loads; without 361"
        "/428; two stages 367; 64x128 284; 128x32, 4 warps 393; 8 warps 384", joint=True, lazy=True),
    Row(256, 64, 16, 4, 2, "with q in registers 2 to 6 spills a turn", parked=True, having=("crowded",)),
    Row(256, 64, 32, 4, 2, "1 x 4096 with a bias 0.585 ms, c 0.299, with segments 0.546; three stages 0.742, 0.356"
        " and 0.632; q in registers, 64x16 0.661 and 0.393, 64x32 with segments 0.656 with 16 spills a turn",
        parked=True, having=("biased dropout", "segmented dropout", "ragged window", "flat window")),
    Row(256, 64, 16, 4, 3, "6000 queries of 4096 keys in a window 0.173 ms, top-left causal 0.379; 64x32 0.163 and"
        " 0.342 with 12 spills a turn, q in shared memory and two stages 0.193 and 0.435", joint=True, lazy=True,
        having=("unseen dropout",)),
    Row(256, 64, 16, 4, 3, "6000 queries of 4096 keys in a window 0.147 ms, top-left causal 0.275; 64x32 0.165 and"
        " 0.219 with a spill a turn, q in shared memory and two stages 0.162 and 0.303", lazy=True,
        having=("unseen fp32 bias",)),
    Row(256, 64, 16, 4, 2, "1 x 4096 with a mask for keys 1.580 ms, for pairs 1.839; three stages 1.777 and 1.986;"
        " 64x32 1.852 and 1.749 with a spill a turn, one stage 2.133 and 2.251, with q in registers 2.923 and 3.017",
        parked=True, having=("listed dropout",)),
    Row(256, 64, 32, 4, 3, "overlap, joint loads and lazy: 1k 581, c 418, 4k 658, c 599, 16k 637, c 648; without"
        " overlap 525/411/545/571/518/537, without lazy 513/399/537/557/510/521; overlap without joint 568/417/639/602"
        "/618/640; cube 16k c 1 % faster, 1k the same; quick steps 16k c 4 %, 4k 3 to 8 %", overlap=True, joint=True,
        lazy=True, cube=True, bare=True),
    Row(256, 64, 32, 4, 3, "4k 0.328 ms with a bias, 0.359 and 3.010 with masks of keys and of pairs; joint loads 0.333"
        " and 0.381, 3.230, of these with 8 spills a turn", lazy=True, having=("bias", "mask")),
    Row(256, 64, 32, 4, 3, "overlap waits after every product with a bias. Joint loads: 1k 526, 4k 601, c 525, 16k 607,"
        " c 610; without 505/571/508/562/583; 128x64, 8 warps, overlap 464/573/486/595/594; 128x32, 8 warps 1k 385"
        " where this has 489", joint=True, lazy=True),
    Row(10**9, 64, 64, 4, 2, "channel parts: the accumulator of one part stays in registers"),
)
_KEYS_90: Table = (
    Row(64, 32, 64, 4, 2, "three kinds of scores at once: no spills", having=("crowded",)),
    Row(64, 64, 64, 4, 2, "whole backward 4k c 1.302 ms, 4k 1.869; three stages 1.319 with 20 spills a turn, and 1.863",
        having=("bias",)),
    Row(64, 64, 64, 4, 3, "1k c 331; two stages 313 where this has 321; 64x128, 8 warps 240"),
    Row(128, 16, 64, 4, 1, "three kinds of scores at once: 32x64 spills", having=("crowded",)),
    Row(128, 32, 64, 4, 3, "two stages 5 spills a turn", having=("listed dropout",)),
    Row(128, 32, 64, 4, 1, "whole backward with a mask for keys 3.762 ms; 16x64 and two stages 4.070",
        having=("biased list",)),
    Row(128, 32, 64, 4, 1, "two stages 5 spills a turn with slopes", having=("mixed list",)),
    Row(128, 32, 64, 4, 2, "whole backward 4k 1.308 ms with a mask for keys, 0.854 with three segments; three stages"
        " 1.394 and 0.884, 64x64 1.257 and 0.861 with a spill a turn", having=("combined", "mask")),
    Row(128, 64, 64, 4, 1, "as column sums; 32x64 and two stages 4 spills a turn where keys or queries may be left out",
        having=("half column window",)),
    Row(128, 32, 64, 4, 2, "where keys or queries may be left out; whole backward 4k c 0.898 ms, 64x64 0.868 with 29"
        " spills a turn; with a bias 64x64 7 to 11", having=("unseen dropout", "unseen bias")),
    Row(128, 64, 64, 4, 1, "two stages 2 to 16 spills a turn, 32x64 too", having=("column sums",)),
    Row(128, 32, 64, 4, 2, "64x64 2 to 7 spills a turn, with a softcap too 159",
        having=("flat fp32 bias", "fp16 window dropout", "unseen softcap")),
    Row(128, 64, 64, 4, 2, "1k c 441; 32x64, 3 stages 361; 64x128, 8 warps 317 where this has 391"),
    Row(256, 64, 64, 8, 2, "196 full: not chosen, see splits_keys"),
    Row(10**9, 32, 64, 4, 2, "channel parts"),
)
_NARROW_KEYS_90 = tuple(row for row in _KEYS_90 if row.dim <= PART)
_KEYS_K_90: Table = (
    *_NARROW_KEYS_90,
    Row(256, 16, 64, 8, 1, "16x128 1 spill a turn", having=("all five",)),
    Row(256, 16, 128, 8, 1, "three kinds of scores at once", having=("crowded",)),
    Row(256, 32, 128, 8, 1, "16x128 and two stages 1 to 12 spills a turn", joint=True,
        having=("listed dropout", "biased dropout")),
    Row(256, 16, 64, 4, 2, "32x128 1 to 3 spills a turn", having=("fp32 biased list",)),
    Row(256, 32, 128, 8, 1, "whole backward with a mask for keys 4.585 ms; 16x64, 4 warps and two stages 4.992",
        joint=True, having=("biased list",)),
    Row(256, 16, 128, 8, 1, "32x128 5 to 8 spills a turn with slopes", having=("combined",)),
    Row(256, 32, 128, 8, 1, "two stages 8 spills a turn", joint=True, having=("banded half column sums",)),
    Row(256, 32, 128, 8, 3, "1k 407, c 296, 16k 505; two stages 337/274/402; 32x64, 4 warps 263/238/280, with one stage"
        " and two blocks resident 232/225; joint loads of this and keys_v: whole backward 1k 287, 16k 349, else 278"
        "/337; k in registers 1k 478, c 381, whole backward 1k c 236, 4k c 338, 16k 367, else 226/319/352",
        joint=True, held=True),
    Row(10**9, 32, 64, 4, 2, "channel parts"),
)
_KEYS_V_90: Table = (
    *_NARROW_KEYS_90,
    Row(256, 16, 128, 8, 1, "three kinds of scores at once", having=("crowded",)),
    Row(256, 64, 128, 8, 1, "whole backward, 6000 queries of 4096 keys in a window 0.708 ms; 32x128 0.784, with two"
        " stages 0.681 with 4 spills a turn", joint=True, having=("unseen half bias",)),
    Row(256, 32, 128, 8, 2, "whole backward with a mask for keys 4.752 ms; 16x128 4.992", joint=True,
        having=("biased list",)),
    Row(256, 16, 128, 8, 2, "32x128 1 spill a turn with a bias or dropout", having=("mixed list",)),
    Row(256, 32, 128, 8, 1, "two stages 20 spills a turn", having=("biased dropout",)),
    Row(256, 32, 128, 8, 2, "whole backward 4k c 1.024 ms; 64x128 1.011 with 46 spills a turn, one stage 1.091; without"
        " a band 1.715, 1.614 with 36; with a mask for keys 2.028, 64x128 2.002 with 1, three stages 2.063",
        joint=True, having=("half bias", "combined", "mask")),
    Row(256, 64, 128, 8, 1, "two stages 1 spill a turn", joint=True, having=("dropout in a corner",)),
    Row(256, 64, 128, 8, 2, "1k 434, c 347, 16k 565; 32x128, 3 stages 1k c 306, 16k 548; 64x64, 4 warps, one stage and"
        " two blocks resident 1k c 299; joint loads: see keys_k", joint=True),
    Row(10**9, 32, 64, 4, 2, "channel parts"),
)
_QUERIES_90: Table = (
    Row(64, 64, 32, 4, 2, "three kinds of scores at once: no spills", having=("crowded",)),
    Row(64, 64, 64, 4, 3, "1k c 401, 16k 576; two stages, 128 registers, four blocks resident 396/583; 128x64 337/526"),
    Row(128, 64, 16, 4, 2, "three kinds of scores at once: 64x32 spills", having=("crowded",)),
    Row(128, 64, 32, 4, 2, "whole backward with dropout and three segments 1.226 ms, with a bias of 4095 keys 2.216;"
        " 64x64 1.250 and 2.098 with 2 and 6 spills a turn, with one stage 1.328 and 2.241",
        having=("segmented dropout", "ragged bias", "unseen sloped dropout")),
    Row(128, 64, 64, 4, 2, "whole backward 4k c 0.872 ms, 4k 1.492, 1k 1.540; 64x32 0.981, 1.675 and 1.738",
        having=("half bias",)),
    Row(128, 64, 32, 4, 2, "whole backward with an fp32 bias 4k c 1.267 ms, 4k 1.925; 64x64 1.337 and 2.100",
        having=("bias",)),
    Row(128, 64, 64, 4, 2, "1k c 362, 16k 580; 64x32 and 168 registers, three blocks resident 346/496; 64x32, 3 stages"
        " 353 where this has 353 and 516 where it has 559; 128x64, 8 warps 280"),
    Row(256, 64, 16, 8, 1, "128x16 1 and 2 spills a turn, 64x32 1", having=("all five", "capped bias in a corner")),
    Row(256, 128, 16, 8, 1, "three stages 1 spill a turn", joint=True, having=("sloped bias in a corner",)),
    Row(256, 128, 16, 8, 3, "one and two stages 4 spills a turn", joint=True, having=("unseen changed bias",)),
    Row(256, 128, 16, 8, 3, "128x32 8 spills a turn", joint=True, having=("half bias in a corner",)),
    Row(256, 128, 16, 8, 1, "128x32 1 to 5 spills a turn", joint=True,
        having=("crowded", "mixed list", "sloped dropout")),
    Row(256, 128, 16, 8, 3, "128x32 5 to 40 spills a turn", joint=True, having=("ragged bias", "unseen fp32 bias")),
    Row(256, 128, 32, 8, 3, "1k 447, c 322; two stages 357 and 256 where this has 318; 64x64, one stage 270/202; 64x32,"
        " two blocks resident 314; joint loads: whole backward 1k 294, 16k 364, else 287/349", joint=True),
    Row(10**9, 64, 32, 4, 2, "channel parts"),
)
_FORWARD_80: Table = (
    Row(64, 128, 64, 4, 3, "mma.sync: 164 KiB of shared memory, four warps of 32 rows"),
    Row(128, 128, 64, 8, 2, "accumulator of 128 x 128 needs eight warps"),
    Row(256, 64, 64, 8, 2, "q and two stages of k and v fill 160 KiB"),
    Row(10**9, 64, 32, 4, 2, "channel parts"),
)
_BACKWARD_80: Table = (
    Row(64, 64, 64, 4, 2, "two accumulators of 64 x 64"),
    Row(128, 64, 64, 8, 2, "two accumulators of 64 x 128 need eight warps"),
    Row(256, 32, 32, 8, 1, "k, v, q and dout of 256 channels"),
    Row(10**9, 32, 32, 4, 1, "channel parts"),
)
_SMALL: Table = (
    Row(64, 64, 64, 4, 2, "fits 64 KiB (gfx942) and 99 KiB (sm_86, sm_89, sm_120)"),
    Row(128, 64, 32, 4, 2, "fits 64 KiB"),
    Row(256, 32, 32, 4, 1, "fits 64 KiB: 256 channels leave no second stage"),
    Row(10**9, 32, 32, 4, 1, "channel parts"),
)
_SMALL_BACKWARD: Table = (
    Row(64, 32, 64, 4, 1, "fits 64 KiB"),
    Row(128, 32, 32, 4, 1, "fits 64 KiB"),
    Row(256, 16, 16, 4, 1, "fits 64 KiB: four tiles of 256 channels"),
    Row(10**9, 16, 32, 4, 1, "channel parts"),
)
_FP32: Table = (
    Row(32, 64, 32, 4, 1, "IEEE products run on the plain units: registers bound the tile"),
    Row(128, 32, 32, 4, 1, "the same, 64 KiB"),
    Row(256, 16, 16, 4, 1, "the same, 256 channels in 64 KiB"),
    Row(10**9, 16, 16, 4, 1, "channel parts"),
)


_UNALIGNED: Table = (
    Row(128, 32, 32, 4, 1, "elements are loaded one by one, each with an address: registers bound the tile; with a"
        " larger one ptxas 12.8 spilled the descriptors of its wgmma and read outside of shared memory"),
    Row(256, 16, 32, 4, 1, "the same, 256 channels"),
    Row(10**9, 32, 32, 4, 1, "channel parts"),
)  # fmt: skip

_TABLES_90: dict[str, Table] = {
    "forward": _FORWARD_90,
    "keys": _KEYS_90,
    "keys_k": _KEYS_K_90,
    "keys_v": _KEYS_V_90,
    "queries": _QUERIES_90,
    "bias": _SMALL,
}


def family(facts: DeviceFacts) -> str:
    """Devices that share tables: Hopper and datacentre Blackwell, Ampere's datacentre chip, everything smaller."""
    if facts.arch in ("sm_90", "sm_100", "sm_103"):
        return "sm_90"
    return "sm_80" if facts.arch == "sm_80" else "small"


def _table(kernel: str, itemsize: int, facts: DeviceFacts, align: int) -> Table:
    if itemsize == 4:
        return _FP32
    if align == 1:
        return _UNALIGNED
    kind = family(facts)
    if kind == "sm_90":
        return _TABLES_90[kernel]
    if kind == "sm_80":
        return {"forward": _FORWARD_80, "bias": _SMALL}.get(kernel, _BACKWARD_80)
    return _SMALL if kernel in ("forward", "bias") else _SMALL_BACKWARD


def power_of_two(size: int) -> int:
    """The least power of two that is at least ``size`` and 16, the smallest side of a matrix product."""
    return max(16, 1 << (size - 1).bit_length())


def keys_of_a_query(problem: Problem) -> int:
    """How many keys a query sees on average, as far as the band decides; of packed sequences one of mean length."""
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    if problem.varlen and problem.batch:
        seqlen_q, seqlen_k = problem.total_q // problem.batch, problem.total_k // problem.batch
    mean = problem.replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return masks.kept_pairs(masks.band(mean), seqlen_q, seqlen_k) // max(seqlen_q, 1)


def is_wide(problem: Problem) -> bool:
    """Whether there are more channels than one part has, and yet all are in a tile."""
    return PART < max(problem.headdim, problem.headdim_v) <= MAX_RESIDENT


def choose_stages(row: Row, kernel: str, problem: Problem) -> int:
    """How deep the pipeline is: a bias or a mask has a tile of its own in each stage.

    Beside those of over 128 channels a backward has room for two such stages, or for two and what dropout needs to
    change the layout of what it drops; for one where there is more than one of the three.
    """
    listed = problem.mask_shape is not None or problem.segments
    more = (problem.bias_shape is not None) + listed + (problem.dropout_p > 0)
    if kernel == "forward" or row.having or not more or not is_wide(problem):
        return row.stages
    return min(row.stages, 2 if more == 1 else 1)


def splits_keys(problem: Problem, facts: DeviceFacts) -> bool:
    """Whether dk and dv come from two launches: on sm_90 accumulators of over 128 channels do not fit together."""
    return family(facts) == "sm_90" and is_wide(problem)


def is_bare(problem: Problem) -> bool:
    """Whether scores are products with the scale, of which only a band excludes some."""
    changed = problem.softcap or problem.bias_shape is not None or problem.alibi or problem.dropout_p
    return not (changed or problem.mask_shape is not None or problem.segments)


def costly(problem: Problem, unseen: bool, bias_align: int) -> tuple[str, ...]:
    """What a problem has of that which takes registers; "half bias": of 16 bits and alone, but for a band at most.

    ``unseen`` and ``bias_align`` as in Mode; a "ragged bias" has rows that are no multiple of 16 bytes, a "flat" one
    the same number for all keys, and "column sums" are the gradient of one with the same number for all queries. Beside
    a bias keys that are left out count as one kind of scores more; a "corner" is what a band leaves without a window.
    """
    bias = problem.bias_dtype if problem.bias_shape is not None else None
    listed = problem.mask_shape is not None or problem.segments
    dropout = problem.dropout_p > 0
    costs = sum((bias is not None, listed, dropout, problem.softcap > 0, problem.alibi))
    banded = problem.banded and not listed
    short = bias is not None and bias.itemsize == 2 and not (listed or dropout)
    half = short and not problem.softcap > 0
    window = problem.window_left is not None and (problem.window_right is not None or problem.causal is not None)
    ragged = problem.bias_shape is not None and problem.bias_shape[-1] > 1 and bias_align == 1
    flat = problem.bias_shape is not None and problem.bias_shape[-1] == 1
    corner = unseen and banded and not window
    sums = bias_kind(problem) == "col"
    found = {
        "window": window,
        "dropout": dropout,
        "banded dropout": banded and dropout,
        "unseen dropout": unseen and banded and dropout,
        "unseen bias": unseen and banded and bias is not None,
        "unseen half bias": unseen and banded and half and not flat,
        "unseen changed bias": unseen and banded and short and (problem.alibi or problem.softcap > 0),
        "unseen sloped dropout": unseen and banded and dropout and problem.alibi,
        "unseen fp32 bias": unseen and banded and bias == torch.float32,
        "listed dropout": listed and dropout,
        "segmented dropout": problem.segments and dropout,
        "biased dropout": bias is not None and dropout,
        "mask": listed,
        "biased list": listed and bias is not None,
        "fp32 biased list": listed and bias == torch.float32,
        "mixed list": listed and costs > 1,
        "segments": problem.segments,
        "bias": bias is not None,
        "ragged bias": ragged,
        "ragged window": ragged and window,
        "sloped dropout": problem.alibi and dropout,
        "fp32 bias": bias == torch.float32,
        "half bias": half,
        "dense flat bias": flat and half and not problem.banded,
        "flat window": flat and half and (window or (unseen and banded)),
        "flat fp32 bias": flat and bias == torch.float32,
        "column sums": sums,
        "half bias in a corner": corner and half,
        "capped bias in a corner": corner and short and problem.softcap > 0,
        "sloped bias in a corner": corner and short and problem.alibi,
        "dropout in a corner": corner and dropout,
        "banded half column sums": sums and half and banded,
        "half column window": sums and half and window,
        "fp16 window dropout": problem.dtype == torch.float16 and window and dropout,
        "unseen softcap": unseen and banded and problem.softcap > 0,
        "combined": costs > 1,
        "all five": costs == 5,
        "crowded": costs + (unseen and banded and bias is not None) > 2,
    }
    return tuple(name for name, has in found.items() if has)


def choose_row(
    kernel: str, problem: Problem, facts: DeviceFacts, align: int, unseen: bool, bias_align: int
) -> Row:
    """The row for a kernel: "forward", "keys" (or its halves "keys_k", "keys_v"), "queries" or "bias"."""
    dim = max(problem.headdim, problem.headdim_v)
    keys = keys_of_a_query(problem)
    table = _table(kernel, problem.dtype.itemsize, facts, align)
    bare, having = is_bare(problem), set(costly(problem, unseen, bias_align))
    fitting = (row for row in table if dim <= row.dim and keys >= row.keys and bare >= row.bare)
    return next(row for row in fitting if not row.having or having & set(row.having))


def loses_queries(problem: Problem, block_d: int, block_n: int) -> bool:
    """Whether ptxas 12.8 would lose q, whose registers it gives to probabilities.

    It does if these are as many, and if a branch to the mask follows arithmetic on scores, be it only a scale that is
    negative or tiny. The tests look for it in every kernel (tests/compile/spills.py).
    """
    scored = problem.softcap > 0 or problem.bias_shape is not None or problem.alibi
    listed = problem.mask_shape is not None or problem.segments  # it does not, but partial tiles want 32 keys as well
    return block_d == block_n and problem.banded and (scored or listed or problem.softmax_scale < SMALLEST_SCALE)


def choose_shape(
    kernel: str, problem: Problem, facts: DeviceFacts, align: int, unseen: bool = False, bias_align: int = 8
) -> Shape:
    """The tile and resources of one kernel for a problem on a device; the alignments and ``unseen`` as in Mode."""
    row = choose_row(kernel, problem, facts, align, unseen, bias_align)
    whole = max(problem.headdim, problem.headdim_v) <= MAX_RESIDENT
    block_d = power_of_two(problem.headdim) if whole else PART
    block_dv = power_of_two(problem.headdim_v) if whole else PART
    boxes = facts.arch == "sm_90" and not INTERPRETED and whole and align > 1 and problem.dtype.itemsize == 2
    block_n = row.block_n
    if kernel == "forward" and boxes and loses_queries(problem, block_d, block_n):
        block_n = 32 if block_n == 64 else 64
    tile = Tile(
        block_m=row.block_m,
        block_n=block_n,
        headdim=problem.headdim,
        headdim_v=problem.headdim_v,
        block_d=block_d,
        block_dv=block_dv,
        num_d=-(-problem.headdim // block_d),
        num_dv=-(-problem.headdim_v // block_dv),
        stages=choose_stages(row, kernel, problem),
        boxes=boxes,
        joint=row.joint,
        overlap=row.overlap,
        held=row.held,
        parked=row.parked,
        lazy=row.lazy,
        early=row.early if row.lazy and is_bare(problem) else 0,
        cube=row.cube and not problem.varlen,
        sums=8 if facts.arch.startswith("sm_") and problem.dtype.itemsize == 2 else 1,
    )
    return Shape(tile, Config(row.warps, align > 1, row.registers))
