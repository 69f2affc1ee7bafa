"""What scripts/hopper_profile.py makes of the pages that ncu prints, and the table of it."""

from __future__ import annotations

from scripts import gpu_speed, hopper_profile

COLUMNS = ["ID", "Kernel Name", *hopper_profile.SHARES.values(), "gpu__time_duration.sum", "sm__cycles_elapsed.max",
           "sm__cycles_active.avg"]  # fmt: skip


def line(*values: object) -> str:
    return ",".join(f'"{value}"' for value in values)


def test_the_raw_page() -> None:
    values = [10.5 * (at + 1) for at in range(len(hopper_profile.SHARES))]
    raw = ["==PROF== Connected", line(*COLUMNS), line("", "", *("%" for _ in values), "ns", "cycle", "cycle"),
           line(0, "backward_kernel(int)", *values, "2,000,000", "3,400,000", "3,230,000")]  # fmt: skip
    (row,) = hopper_profile.counters(raw)
    assert row["kernel"] == "backward_kernel"
    assert row["tensor"] == 10.5
    assert (row["us"], row["ghz"], row["busy"]) == (2000.0, 1.7, 95.0)
    without = [line(*COLUMNS[:2], *COLUMNS[-3:]), line(0, "forward_kernel", 1, 1, 1)]  # counters ncu does not know
    assert "tensor" not in next(hopper_profile.counters(without))


def test_the_source_page() -> None:
    source = [line("Kernel Name", "forward_kernel", ""), line("Address", "Source", hopper_profile.SAMPLES)]
    consumer = [("USETMAXREG.DEALLOC.CTAPOOL 0xf0", 0), ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ", 10),
                ("WARPGROUP.DEPBAR.LE gsb0, 0x1", 5), ("@P0 MUFU.EX2 R4, R5", 20), ("FMNMX R1, R2, R3, !PT", 5),
                ("FENCE.VIEW.ASYNC.S", 10), ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4", 1), ("@!P0 BRA 0x10", 9),
                ("BAR.SYNC.DEFER_BLOCKING R5, 0x100", 0), ("UIADD3 UR22, UP2, UR16, 0x80", 0), ("UMOV UR20, URZ", 30),
                ("FFMA R1, R2, R3, R4", 10)]  # fmt: skip
    producer = [("USETMAXREG.DEALLOC.CTAPOOL 0x18", 0), ("UTMALDG.4D [UR16], [UR24]", 1000)]
    source += [line(f"0x{16 * at:x}", *one) for at, one in enumerate([*consumer, *producer])]
    (listing,) = hopper_profile.listings(source)
    assert hopper_profile.consumers(listing) == {
        "products": 15.0, "exponentials": 20.0, "maxima": 5.0, "shared memory": 10.0, "barriers": 50.0,
        "other instructions": 0.0,
    }  # fmt: skip


def test_a_recorded_profile_becomes_a_table() -> None:
    facts = {"device": "a GPU", "driver": "1", "commit": "abc", "date": "2026-01-01"}
    waits = dict.fromkeys((*hopper_profile.WAITS, hopper_profile.OTHER), 10.0)
    shares = {name: 84.9 for name in hopper_profile.SHARES if name != "dram"}
    row = {"pass": "forward", "case": "c", **shares, "ghz": 1.688, "consumers": waits, **facts}
    text = "\n".join(gpu_speed.cycles([{**row, "pass": "backward"}, row]))
    assert "| forward | c | 85 | 85 | 85 | 85 | 85 | 85 | 85 |  | 1.69 | 10 | 10 | 10 | 10 | 10 | 10 |" in text
    assert text.index("| forward |") < text.index("| backward |")
    assert "commit abc" in text
    assert gpu_speed.cycles([]) == []
