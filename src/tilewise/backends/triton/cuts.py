"""The mask of a band for scores of a wgmma, under a branch of each warp that Triton does not see (docs/triton.md)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _masks(row: int, words: int, has_lower: bool, has_upper: bool) -> str:
    """PTX: bit c of word w of a thread's row is set where column + 32 w + c lies in [begin, end).

    The thread's other row is 8 below. A word that is shifted by 32 or more is 0.
    """
    text = f" add.s32 begin, lower, {8 * row};" if has_lower else " mov.s32 begin, 0;"
    text += f" add.s32 end, upper, {8 * row}; min.s32 end, end, length;" if has_upper else " mov.s32 end, length;"
    text += " max.s32 begin, begin, column; sub.s32 begin, begin, column;"  # in this order nothing overflows
    text += " max.s32 end, end, column; sub.s32 end, end, column;"
    for word in range(words):
        text += f" shl.b32 from, -1, begin; shl.b32 to, -1, end; not.b32 to, to; and.b32 mask{row}{word}, from, to;"
        text += " sub.s32 begin, begin, 32; max.s32 begin, begin, 0; sub.s32 end, end, 32; max.s32 end, end, 0;"
    return text


@triton.constexpr_function
def _kept(count: int, has_lower: bool, has_upper: bool) -> str:
    """PTX: ``count`` scores of a thread, -inf outside of their row's columns if the tile is cut at all.

    Operands, ``count`` each: the results; scores, columns, rows, by how much the first and the last column of a row
    exceed it, the columns of all rows, whether the tile is cut. Element i is of the thread's row (i >> 1) & 1, and its
    column 8 (i >> 2) + (i & 1) after that of element 0.
    """
    kept, score, column = ([f"${k * count + i}" for i in range(count)] for k in range(3))
    row, lower, upper, length, cut = (f"${k * count}" for k in range(3, 8))
    words = count * 2 // 32
    text = "{ .reg .pred stays; .reg .s32 lower, upper, length, column, begin, end, from, to, bit;"
    text += "".join(f" .reg .b32 mask{r}{word};" for r in (0, 1) for word in range(words))
    text += "".join(f" mov.f32 {kept[i]}, {score[i]};" for i in range(count))
    text += f" setp.eq.s32 stays, {cut}, 0; @stays bra.uni WHOLE;"
    text += f" mov.s32 column, {column[0]}; mov.s32 length, {length};"
    text += f" add.s32 lower, {row}, {lower}; add.s32 upper, {row}, {upper}; add.s32 upper, upper, 1;"
    text += _masks(0, words, has_lower, has_upper) + _masks(1, words, has_lower, has_upper)
    for i in range(count):
        after = 8 * (i >> 2) + (i & 1)
        text += f" and.b32 bit, mask{(i >> 1) & 1}{after // 32}, {1 << after % 32}; setp.ne.b32 stays, bit, 0;"
        text += f" selp.f32 {kept[i]}, {score[i]}, 0fFF800000, stays;"
    return f"{text} WHOLE: }}"


@triton.constexpr_function
def _operands(count: int) -> str:
    return ",".join(["=&f"] * count + ["f"] * count + ["r"] * (6 * count))


@triton.jit
def kept_keys(s, cut, i, j, lower, upper, seqlen_k, MODE: tl.constexpr):
    """The scores s, if the tile is cut -inf for keys that do not exist or are outside of the band (bands.keep_keys)."""
    COUNT: tl.constexpr = s.shape[1] // 2  # elements of a thread
    none = tl.zeros_like(s).to(tl.int32)
    return tl.inline_asm_elementwise(
        _kept(COUNT, MODE.lower, MODE.upper), _operands(COUNT),
        [s, none + j, none + i, none + lower, none + upper, none + seqlen_k, none + cut.to(tl.int32)],
        dtype=tl.float32, is_pure=True, pack=COUNT)
