"""Muon on a CPU: torch's, orthogonalising in float32.

`torch.optim.Muon` does its matrix products in bfloat16, which is what a GPU is fast at. A CPU without bfloat16 units
does them some 30 times slower than in float32 (2 against 65 GFLOP/s on one core): 58 % of a small model's training.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
"""Steps of the quintic Newton-Schulz iteration: as in torch.optim.Muon and in Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/."""
EPS = 1e-7


class Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` and Nesterov momentum, its products in float32.

    State and groups are torch's, so what one has saved the other resumes.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients; there is no closure."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                updates = orthogonalised(torch.stack([self._momentum(p, group["momentum"]) for p in parameters]))
                # Liu et al. 2025, arXiv:2502.16982, section 2.2: the size of AdamW's update.
                adjusted = group["lr"] * 0.2 * max(shape) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-adjusted)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[parameter]
        assert parameter.grad is not None  # noqa: S101 - those without were left out
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices of one shape with their singular values brought near 1, by Newton-Schulz: (M, A, B) -> (M, A, B)."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if is_tall else matrices  # the smaller Gram matrix
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = found @ found.mT  # (M, A, A)
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if is_tall else found
