"""torch's own flash kernel for CPUs, used where it means exactly the same."""

from tilewise.backends.sdpa.backend import BACKEND as BACKEND
