"""Ask what a call will do before paying for it: the backend and why, the work, the memory.

    python examples/explain_before_running.py

The tensors are on the meta device, so nothing of their size is allocated.
"""

import torch

import tilewise


def main() -> None:
    q = torch.empty(1, 32768, 32, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    k, v = (torch.empty(1, 32768, 8, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    print(tilewise.explain(q, k, v, causal=True, window_size=(1023, 0), softcap=30.0))


if __name__ == "__main__":
    main()
