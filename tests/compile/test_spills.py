"""What is a loop in machine code, on made-up listings."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.compile.spills import loop_spans, lost_operands

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR16], RZ, !UPT, gsb0 ;"
WAIT_BEHIND = f"""
.L_x_0:
    IMAD.MOV.U32 R88, RZ, RZ, R16 ;
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9+0xc000], R24 ;
    @!P0 BRA `(.L_x_2) ;
.L_x_1:
    {PRODUCT}
    @P1 BRA `(.L_x_0) ;
    IMAD.MOV.U32 R88, RZ, RZ, 0x2 ;
    EXIT ;
.L_x_2:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9+0xc000], R24 ;
    @!P0 BRA `(.L_x_2) ;
    BRA `(.L_x_1) ;
"""
LOST = f"""
.L_x_0:
    {PRODUCT}
    IMAD.MOV.U32 R88, RZ, RZ, 0x2 ;
    @P1 BRA `(.L_x_0) ;
    EXIT ;
"""
LOST_BY_A_PART_BEHIND = f"""
.L_x_0:
    {PRODUCT}
    @P1 BRA `(.L_x_1) ;
    BRA.DIV UR4, `(.L_x_2) ;
    EXIT ;
.L_x_1:
    @P2 EXIT ;
    IMAD.MOV.U32 R88, RZ, RZ, 0x2 ;
    BRA `(.L_x_0) ;
.L_x_2:
    EXIT ;
"""
IN_TURNS = f"""
.L_x_0:
    BRX R2 -0x480 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);
.L_x_1:
    IMAD.MOV.U32 R88, RZ, RZ, R16 ;
    EXIT ;
.L_x_2:
    {PRODUCT}
    BRA `(.L_x_0) ;
"""


def listing(text: str) -> list[str]:
    """As nvdisasm prints it, an address before every instruction."""
    lines = enumerate(text.strip().splitlines())
    return [line if line.startswith(".L") else f"        /*{16 * i:04x}*/    {line.strip()}" for i, line in lines]


@pytest.mark.parametrize(
    ("text", "loops", "lost"),
    [
        (WAIT_BEHIND, [(0, 6), (9, 11)], 0),  # old registers read by the product are new ones of every turn
        (LOST, [(0, 3)], 1),
        (LOST_BY_A_PART_BEHIND, [(0, 8)], 1),
        (IN_TURNS, [(0, 7)], 0),
    ],
)
def test_a_jump_back_is_a_loop_where_the_code_between_comes_to_it(
    text: str, loops: list[tuple[int, int]], lost: int
) -> None:
    assert loop_spans(listing(text)) == loops
    assert len(lost_operands(listing(text))) == lost
