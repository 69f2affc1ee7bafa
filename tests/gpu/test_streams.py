"""Streams, graphs and devices: a call runs where its tensors are and when its stream says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tilewise

pytestmark = pytest.mark.rooms("triton", "hopper")
BF16 = torch.bfloat16
WAIT = 20_000_000  # cycles, about 10 ms


def inputs(headdim: int = 64) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 300, 4, headdim, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))


def step(tensors: tuple[torch.Tensor, ...], backend: str) -> tuple[torch.Tensor, ...]:
    out = tilewise.attention(*tensors, causal=True, backend=backend)
    return (out, *torch.autograd.grad(out, tensors, torch.ones_like(out)))


def same(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """out bit for bit; gradients, which may be summed in another order, closely."""
    assert torch.equal(actual[0], expected[0])
    for one, other in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def refill(tensors: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def test_a_call_waits_for_its_own_stream_alone(backend: str) -> None:
    tensors, later = inputs(), inputs()
    expected = step(later, backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(WAIT)
        refill(tensors, later)
        found = step(tensors, backend)
    stream.synchronize()
    same(found, expected)


@pytest.mark.parametrize("headdim", [64, 256])  # of 256 channels launches overlap on either backend
def test_a_graph_computes_anew_at_every_replay(backend: str, headdim: int) -> None:
    tensors = inputs(headdim)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(tensors, backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(tensors, backend)
    for _ in range(3):
        refill(tensors, inputs(headdim))
        graph.replay()
        torch.cuda.synchronize()
        same(captured, step(tensors, backend))


def test_two_streams_at_once(backend: str) -> None:
    both = (inputs(), inputs())
    expected = [step(tensors, backend) for tensors in both]
    torch.cuda.synchronize()
    streams = (torch.cuda.Stream(), torch.cuda.Stream())
    found: list[list[tuple[torch.Tensor, ...]]] = [[], []]
    for _ in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[index].append(step(both[index], backend))
    torch.cuda.synchronize()
    for index in range(2):
        for one in found[index]:
            same(one, expected[index])


def test_a_thread_that_has_not_touched_the_device(backend: str) -> None:
    """Its tensors come from another thread, its memory from torch's cache: its first driver call is ours."""
    tensors = inputs()
    expected = step(tensors, backend)
    copies = [tuple(t.detach().clone().requires_grad_() for t in tensors) for _ in range(8)]  # at addresses unheard of
    torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda one: step(one, backend), copies):
            same(found, expected)


def test_the_first_backward_of_a_process(backend: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("sanitized.py")), backend]
    here = {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=os.environ | here)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.multi_gpu
def test_case_119_tensors_on_another_device(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    qkv = torch.ones(4, 16, 3, 32, 64, device="cuda:1", dtype=torch.float16)
    out = tilewise.attention(*qkv.unbind(2), softmax_scale=1.0, backend=backend)
    assert out.abs().sum(dtype=torch.float32).item() == 131072
    assert torch.cuda.current_device() == 0


@pytest.mark.multi_gpu
def test_gradients_on_another_device(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = inputs()
    moved = tuple(t.detach().to("cuda:1").requires_grad_() for t in tensors)
    found = step(moved, backend)
    assert all(t.device.index == 1 for t in found)
    same(tuple(t.to("cuda:0") for t in found), step(tensors, backend))


def test_nothing_is_read_back(backend: str) -> None:
    """No call waits for the device, dense or packed."""
    tensors = inputs()
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    packed = tuple(t.detach()[0].requires_grad_() for t in tensors)

    def varlen() -> tuple[torch.Tensor, ...]:
        out = tilewise.attention_varlen(*packed, cu_seqlens_q=offsets, max_seqlen=200, backend=backend)
        return torch.autograd.grad(out, packed, out.detach())

    works: tuple[Callable[[], object], ...] = (lambda: step(tensors, backend), varlen)
    for work in works:
        work()
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
