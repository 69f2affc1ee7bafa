"""Portable kernels in Triton: NVIDIA sm_80 and up, AMD, and the CPU under the interpreter."""

from tilewise.backends.triton.backend import BACKEND as BACKEND
