"""What a launch keeps from call to call, and how those of a plan get their kernels, without a device."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import driver

from tests.compile import kernels
from tilewise.backends.triton import launch
from tilewise.backends.triton.arguments import Box, Config, divisor_of
from tilewise.backends.triton.launch import KNOWN_LIMIT, Descriptor, Launch, side_by_side
from tilewise.backends.triton.tails import clear_tail_kernel


def test_a_descriptor_is_encoded_once_for_an_address():
    encoded = []

    def encode(box: Box) -> list[int]:
        encoded.append(box.base.data_ptr())
        return [box.base.data_ptr(), *box.shape]

    descriptor = Descriptor(Box(torch.bfloat16, (2, 64), (64, 1), (1, 64)), encode)
    assert descriptor.at(4096) == [4096, 2, 64]
    assert descriptor.at(4096) == [4096, 2, 64]
    assert descriptor.at(8192) == [8192, 2, 64]
    assert encoded == [4096, 8192]


def test_the_descriptors_that_are_kept_are_bounded():
    descriptor = Descriptor(Box(torch.bfloat16, (1,), (1,), (1,)), lambda box: [box.base.data_ptr()])
    for address in range(16, 16 * (2 * KNOWN_LIMIT), 16):
        assert descriptor.at(address) == [address]
        assert len(descriptor.known) <= KNOWN_LIMIT


def test_a_thread_gets_its_context_before_it_encodes_and_once(monkeypatch):
    """A driver call in a thread that had made no runtime call failed: the first backward of a process."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: done.append("context"))
    descriptor = Descriptor(Box(torch.bfloat16, (1,), (1,), (1,)), lambda box: done.append("encoded") or [0])

    def work() -> None:
        for address in (16, 32):
            descriptor.at(address)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        descriptor.known.clear()
    assert done == ["context", "encoded", "encoded"] * 2


def test_the_calling_thread_loads_a_kernel_itself(device, monkeypatch):
    loading = []
    load = launch._load
    monkeypatch.setattr(launch, "_load", lambda wanted: (loading.append(threading.current_thread()), load(wanted)))
    clear_two(device)
    assert len(loading) == 2
    assert threading.current_thread() in loading


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> torch.device:
    """A device that kernels are compiled for and that takes what it is given; the disk cache is empty."""
    utils = SimpleNamespace(
        get_device_properties=lambda index: {"max_shared_mem": 227 * 1024},
        load_binary=lambda *arguments: (object(), 0, 0, 0, 1024),
        unload_module=lambda module: None,
    )
    fake = SimpleNamespace(
        get_current_target=lambda: kernels.TARGETS["sm_90"][0],
        get_current_device=lambda: 0,
        launcher_cls=lambda source, metadata: lambda *arguments: None,
        utils=utils,
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "_COMPILED", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(driver, "_active", fake)
    return torch.device("cuda", 0)


def clear(device: torch.device, cols: int, rows: int = 16) -> Launch:
    tail = (2, 100, 64, 1, 64, 0.0, rows, cols)
    return Launch(clear_tail_kernel, 64, (torch.bfloat16, torch.int32), tail, Config(4), device)


def clear_two(device: torch.device) -> list[Launch]:
    with side_by_side():
        return [clear(device, 64), clear(device, 128), clear(device, 64)]  # two different kernels


def test_the_launches_of_a_plan_compile_at_the_same_time(device, monkeypatch):
    both = threading.Barrier(2, timeout=60)
    compile_kernel = launch.compile_kernel

    def meet(*arguments: Any) -> Any:
        both.wait()
        return compile_kernel(*arguments)

    monkeypatch.setattr(launch, "compile_kernel", meet)
    before = threading.active_count()
    launches = clear_two(device)
    assert threading.active_count() == before
    assert len(launch._COMPILED) == 2
    assert launches[0].fixed == launches[2].fixed
    assert all(callable(made.run) for made in launches)


def test_one_kernel_at_a_time_is_parsed(device, monkeypatch):
    """ast.parse on two threads at once raised SystemError now and then."""
    inside, most = [], []
    make_ir = launch.ASTSource.make_ir

    def watched(*arguments: Any) -> Any:
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.05)
        try:
            return make_ir(*arguments)
        finally:
            inside.pop()

    monkeypatch.setattr(launch.ASTSource, "make_ir", watched)
    clear_two(device)
    assert most == [1, 1]


def test_what_a_compilation_raises_reaches_the_caller(device, monkeypatch):
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(launch, "compile_kernel", fail)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="does not compile"):
        clear_two(device)
    assert threading.active_count() == before
    assert not launch._COMPILED
    with pytest.raises(RuntimeError, match="does not compile"):  # nothing waits any more
        clear(device, 64)


def test_a_kernel_that_does_not_fit_says_so(device, monkeypatch):
    utils = driver.active.utils
    monkeypatch.setattr(utils, "load_binary", lambda *arguments: (object(), 0, 0, 0, 64))
    with pytest.raises(Exception, match="out of resource: threads"):
        clear_two(device)


def test_kernels_are_the_same_however_they_were_compiled(device, monkeypatch, tmp_path):
    q, k, v = (torch.empty(2, 256, 2, 256, dtype=torch.bfloat16) for _ in range(3))
    wanted = kernels.launches("sm_90", q, k, v, backward=True, names=("q", "k", "v"), causal="bottom_right")
    assert len(wanted) == 3
    with side_by_side():
        for one in wanted:
            Launch(one.kernel, 1, one.arguments, (), one.config, device)
    keys = [launch.Wanted(one.kernel, one.arguments, one.config, device).key() for one in wanted]
    together = [launch._COMPILED[key].asm["cubin"] for key in keys]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert together == [kernels.build(one, "sm_90").asm["cubin"] for one in wanted]


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 8, 12, 24, 40, 641, 2**16 - 1, 2**16 + 1, 2**30 + 1, 2**31 - 1])
def test_a_division_by_a_product(divisor):
    """As places.divided does it, where a rounding error would show: around multiples and at the last number."""
    product, shift = divisor_of(divisor)
    for multiple in (0, divisor, 2 * divisor, (2**31 - 1) // divisor * divisor):
        for number in range(max(multiple - 2, 0), min(multiple + 3, 2**31)):
            assert (2 * number * (product % 2**32) >> 32) >> shift == number // divisor
