"""The readable backend: every matrix is written out, forward, backward, forward mode and second order."""

from tilewise.backends.reference.backend import BACKEND as BACKEND
