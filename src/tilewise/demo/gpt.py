"""A byte-level GPT, trained for a few dozen steps on the Python standard library's own source files."""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilewise.bench.peak import PeakMemory
from tilewise.demo.attentions import ATTENTIONS, Attention

OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of one training run."""

    layers: int = 2
    nheads: int = 4
    headdim: int = 32
    seqlen: int = 1024
    batch: int = 2
    steps: int = 32
    seed: int = 0
    corpus_bytes: int = 2_000_000

    @property
    def width(self) -> int:
        """Channels of the residual stream."""
        return self.nheads * self.headdim


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and added to the stream."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.attention = attention
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """(batch, seqlen, width) to the same."""
        heads = self.qkv(self.norm_attention(stream)).unflatten(-1, (3, self.shape.nheads, self.shape.headdim))
        out = self.attention(*heads.unbind(-3))
        stream = stream + self.project(out.flatten(-2))
        grown: torch.Tensor = stream + self.mlp(self.norm_mlp(stream))
        return grown


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, shape.width), nn.Embedding(shape.seqlen, shape.width)
        self.blocks = nn.Sequential(*(Block(shape, attention) for _ in range(shape.layers)))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, seqlen) int64 to (batch, seqlen, 256)."""
        stream = self.tokens(text) + self.positions(torch.arange(text.shape[1]))
        logits: torch.Tensor = self.head(self.norm(self.blocks(stream)))
        return logits


def corpus(limit: int) -> tuple[torch.Tensor, int]:
    """The first ``limit`` bytes of the standard library's top-level modules in order of name, and how many files."""
    text, files = bytearray(), 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_bytes()
        files += 1
    return torch.frombuffer(text[:limit], dtype=torch.uint8), files


def train(attention: str, shape: Shape, on_step: OnStep) -> dict[str, Any]:
    """Loss (nats a byte) of every step, median seconds a step, and peak extra bytes over the whole run."""
    text, files = corpus(shape.corpus_bytes)
    torch.manual_seed(shape.seed)
    model = GPT(shape, ATTENTIONS[attention])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(shape.seed)
    span = torch.arange(shape.seqlen + 1)
    losses, seconds = [], []
    with PeakMemory() as peak:
        for step in range(shape.steps):
            starts = torch.randint(len(text) - shape.seqlen - 1, (shape.batch, 1), generator=generator)
            batch = text[starts + span].long()
            started = time.perf_counter()
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - started)
            on_step(step + 1, shape.steps)
    return {
        "losses": losses,
        "seconds": statistics.median(seconds),
        "bytes": peak.extra,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "corpus_files": files,
        "corpus_bytes": len(text),
    }
