"""Probabilities in e4m3, four keys a word, in an order of instructions that the assembler would not choose.

A special function takes 8 clocks of a warp, and what the others can do meanwhile is what multiplies before it and what
adds and rounds after it. The assembler puts all 64 multiplications first; then nothing is left to fill the gaps with.
So a word's multiplications wait for a word before it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as gluon_core


@gluon.jit
def by_words(s):
    """The four keys of each word, (rows, words, threads): 2q, 2q + 1, 2q + 8 and 2q + 9 of each 16."""
    KEYS: gl.constexpr = s.shape[1]
    first, second = gl.split(s.reshape([64, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]))
    a, c = gl.split(first)
    b, d = gl.split(second)
    return a, b, c, d


@gluon.jit
def first_word(x):
    """Of each thread's words of a row the first."""
    for _ in gl.static_range(x.shape[1].bit_length() - 1):
        x, _ = gl.split(gl.permute(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2, 4]), [0, 1, 3, 2]))
    return gl.reshape(x, [x.shape[0], 4])


def _word(i: int, keys: list[str], scale: str, raised: str, word: str, before: str | None) -> str:
    """PTX: one word, and its four probabilities added to s0 or s1, the sum of its row.

    No probability is negative, so a word's sign bit, which the assembler does not know, changes nothing.
    """
    text = f" mov.b32 raised, {raised};"
    if before is not None:
        text = f" lop3.b32 raised, {raised}, {before}, 0x80000000, 0x78;"  # a ^ (b & c)
    for x, key in zip("abcd", keys, strict=True):
        text += f" fma.rn.f32 {x}, {key}, {scale}, raised; ex2.approx.ftz.f32 {x}, {x};"
    total = f"s{i % 2}"
    text += f" add.f32 {total}, a, b;" if i < 2 else f" add.f32 t, a, b; add.f32 {total}, {total}, t;"
    text += f" add.f32 t, c, d; add.f32 {total}, {total}, t;"
    return text + (
        " cvt.rn.satfinite.e4m3x2.f32 low, b, a; cvt.rn.satfinite.e4m3x2.f32 high, d, c;"
        f" mov.b32 {word}, {{low, high}};"
    )


@gluon_core.builtin
def held_words(keys, scale, raised, count, held, _semantic=None):
    """2**(keys * scale + raised) in words, and each row's sum in the place of each of its words.

    ``count``: words of a thread, of its two rows in turn; ``held``: how many words before a word waits for, or 0.
    """
    count, held = map(gluon_core._unwrap_if_constexpr, (count, held))
    words, sums, a, b, c, d, scales, shifts = ([f"${first * count + i}" for i in range(count)] for first in range(8))
    text = "{ .reg .b16 low, high; .reg .b32 raised; .reg .f32 a, b, c, d, s0, s1, t;"
    for i in range(count):
        before = words[i - held] if 0 < held <= i else None
        text += _word(i, [a[i], b[i], c[i], d[i]], scales[i], shifts[i], words[i], before)
    text += "".join(f" mov.f32 {sums[i]}, s{i % 2};" for i in range(count)) + " }"
    constraints = ",".join(["=&r"] * count + ["=&f"] * count + ["f"] * (6 * count))
    return gluon_core.inline_asm_elementwise(
        text, constraints, [*keys, scale, raised], (gl.int32, gl.float32), False, count, _semantic=_semantic
    )
