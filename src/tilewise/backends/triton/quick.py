"""The softmax step where a row's maximum follows late (follow.py), for scores of a wgmma: no thread waits for another.

While no score outgrows its row's maximum, which is so in all but one or two turns of a row, scores are measured from
the maximum of the turns before, and all that a warp asks is whether it is so. Else it does the step properly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton import primitives as P  # noqa: N812
from tilewise.backends.triton.follow import spread

UNSEEN = tl.constexpr(-3.4028234663852886e38)  # the maximum of rows without a key so far: any score outgrows it


@triton.constexpr_function
def _measured(x: list[str], scores: list[str]) -> str:
    """PTX: scores in log2 units less the maximum of their row, of which a thread has two: (i >> 1) & 1."""
    return "".join(f" fma.rn.f32 {x[i]}, {score}, unit, less{(i >> 1) & 1};" for i, score in enumerate(scores))


@triton.constexpr_function
def _exponentials(x: list[str], of: list[str]) -> str:
    """PTX: 2 to the power of some numbers."""
    return "".join(f" ex2.approx.ftz.f32 {power}, {number};" for power, number in zip(x, of, strict=True))


@triton.constexpr_function
def _largest(names: list[str]) -> str:
    """PTX: the first of some integers becomes the largest; that of three is one instruction."""
    text = ""
    while len(names) > 1:
        groups = [names[i : i + 3] for i in range(0, len(names), 3)]
        for group in groups:
            text += "".join(f" max.s32 {group[0]}, {group[0]}, {other};" for other in group[1:])
        names = [group[0] for group in groups]
    return text


@triton.constexpr_function
def _followed(scores: list[str], row: int) -> str:
    """PTX: the new maximum of a thread's row, what scores are measured from, and by what its sums shrink."""
    eight, infinity, nothing = "0f41000000", "0f7F800000", "0fCC900000"  # follow.LAZY, .., primitives.NOTHING
    mine = [score for i, score in enumerate(scores) if (i >> 1) & 1 == row]
    text = f" max.f32 a, {mine[0]}, {mine[2]}; max.f32 b, {mine[1]}, {mine[3]};"  # two chains
    for i in range(4, len(mine), 2):
        text += f" max.f32 a, a, {mine[i]}; max.f32 b, b, {mine[i + 1]};"
    text += " max.f32 a, a, b;"
    for lanes in (2, 1):  # four threads share a row
        text += f" shfl.sync.bfly.b32 b, a, {lanes}, 31, 0xffffffff; max.f32 a, a, b;"
    return text + (
        f" fma.rn.f32 b, a, unit, less{row}; setp.gt.f32 moved, b, {eight};"
        f" mul.f32 a, a, unit; mov.f32 b, top{row}; selp.f32 top{row}, a, b, moved;"
        f" sub.f32 shrink{row}, b, top{row}; ex2.approx.ftz.f32 shrink{row}, shrink{row};"
        f" setp.lt.f32 moved, top{row}, {nothing}; selp.f32 a, {infinity}, top{row}, moved;"
        f" neg.f32 less{row}, a;"
    )


@triton.constexpr_function
def _quick_step(count: int, early: int) -> str:
    """PTX of a step for ``count`` scores of a thread.

    Operands, ``count`` each: scores less the maximum, the first ``early`` of them as exponentials; the new maximum; by
    what sums shrink. Then raw scores, the old maximum and what a raw score of 1 is in log2 units.
    """
    x, new, shrink, scores, old, unit = ([f"${k * count + i}" for i in range(count)] for k in range(6))
    begin = f"{{ .reg .pred moved; .reg .f32 a, b, unit, top<2>, less<2>, shrink<2>; .reg .b32 big<{count}>;"
    begin += f" mov.f32 unit, {unit[0]};"
    end = " STEADY:"
    for row in (0, 1):
        begin += f" mov.f32 top{row}, {old[2 * row]}; neg.f32 less{row}, top{row}; mov.f32 shrink{row}, 0f3F800000;"
    for i in range(count):
        end += f" mov.f32 {new[i]}, top{(i >> 1) & 1}; mov.f32 {shrink[i]}, shrink{(i >> 1) & 1};"
    measured, powers = _measured(x, scores), _exponentials(x[:early], x[:early])
    # as integers, numbers above 0 keep their order and those below stay below: is one above 8 (follow.LAZY)?
    ask = "".join(f" mov.b32 big{i}, {x[i]};" for i in range(count)) + _largest([f"big{i}" for i in range(count)])
    answer = " setp.gt.s32 moved, big0, 0x41000000; vote.sync.any.pred moved, moved, 0xffffffff;"
    proper = _followed(scores, 0) + _followed(scores, 1) + measured + powers
    return f"{begin}{measured}{ask}{powers}{answer} @!moved bra.uni STEADY;{proper}{end} }}"


@triton.constexpr_function
def _other_exponentials(count: int, early: int) -> str:
    """PTX: exponentials of the operands, but for the first ``early`` ones, which are exponentials already."""
    x, of = ([f"${k * count + i}" for i in range(count)] for k in range(2))
    same = "".join(f" mov.f32 {x[i]}, {of[i]};" for i in range(early))
    return f"{{{same}{_exponentials(x[early:], of[early:])} }}"


@triton.constexpr_function
def _operands(results: int, given: int) -> str:
    """Constraints of so many numbers."""
    return ",".join(["=&f"] * results + ["f"] * given)


@triton.jit
def first(a, b):
    return a


@triton.jit
def by_part(x, PARTS: tl.constexpr):
    """What is the same in all columns of a row and part."""
    return tl.reduce(tl.reshape(x, [x.shape[0], x.shape[1] // PARTS, PARTS]), 1, first)


@triton.jit
def quick_step(s, row_max, row_sum, unit, EARLY: tl.constexpr):
    """One step of the online softmax (primitives.softmax_step) of raw products; row_max in log2 units, by part.

    EARLY: exponentials of a thread that do not wait for its warp's answer.
    """
    COUNT: tl.constexpr = s.shape[1] // 2  # elements of a thread
    PARTS: tl.constexpr = row_sum.shape[1]
    x, row_max, rescale = tl.inline_asm_elementwise(
        _quick_step(COUNT, EARLY), _operands(3 * COUNT, 3 * COUNT),
        [s, spread(row_max, s.shape[1]), tl.zeros_like(s) + unit],
        dtype=(tl.float32, tl.float32, tl.float32), is_pure=False, pack=COUNT)
    p = tl.inline_asm_elementwise(
        _other_exponentials(COUNT, EARLY), _operands(COUNT, COUNT), [x], dtype=tl.float32, is_pure=True, pack=COUNT)
    rescale = by_part(rescale, PARTS)
    row_sum = row_sum * rescale + P.partial_sums(p, PARTS)
    return p, by_part(row_max, PARTS), row_sum, rescale


@triton.jit
def row_maxima(row_max):
    """The maxima of quick steps by row, as other steps have them."""
    row_max = tl.max(row_max, 1)
    return tl.where(row_max == UNSEEN, float("-inf"), row_max)
