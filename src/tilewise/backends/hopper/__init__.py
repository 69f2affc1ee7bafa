"""Warp-specialised kernels for Hopper (sm_90a) in Gluon: TMA, wgmma, one producer warp and two or three consumers."""

from tilewise.backends.hopper.backend import BACKEND as BACKEND
