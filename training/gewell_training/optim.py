"""Muon for the matrices inside the layers, Adam for everything else.

Muon (K. Jordan, 2024): the update is the momentum with all its singular values set to about 1. Matrices of one shape
are handled as one batch.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalize(g: Tensor, num_steps: int = 5) -> Tensor:
    """g [n, rows, cols] -> nearly U V^T of each matrix's singular value decomposition, by a quintic iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g.float()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    out: Tensor = x.mT if is_tall else x
    return out


class Muon:
    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        self._groups = list(by_shape.values())
        self._buffers = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self._groups]

    @torch.no_grad()
    def step(self, lr_factor: float, momentum: float | None = None) -> None:
        beta = self.momentum if momentum is None else momentum
        for group, buffer in zip(self._groups, self._buffers, strict=True):
            grad = torch.stack([p.grad for p in group if p.grad is not None])
            buffer.lerp_(grad, 1 - beta)
            update = orthogonalize(grad.lerp(buffer, beta)).float()
            lr = self.lr * lr_factor
            rows, cols = group[0].shape
            shrink, step = 1 - lr * self.weight_decay, lr * max(1.0, rows / cols) ** 0.5
            torch._foreach_mul_(group, shrink)
            torch._foreach_add_(group, list(update.unbind()), alpha=-step)


class Optimizer:
    """Both optimisers behind one `step`. `lr_factor` follows the schedule, from 0 to 1 and back."""

    def __init__(self, model: nn.Module, *, muon_lr: float = 0.02, adam_lr: float = 2e-3) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("embed")]
        is_matrix = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in is_matrix]
        self._muon = Muon(matrices, muon_lr)
        self._adam = torch.optim.Adam(rest, lr=adam_lr, betas=(0.9, 0.98), eps=1e-9, fused=rest[0].is_cuda)
        self._adam_lr = adam_lr
        self._parameters = [*matrices, *rest]

    def step(self, lr_factor: float) -> Tensor:
        """Clip, update, clear the gradients; returns the gradients' norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._muon.step(lr_factor)
        for group in self._adam.param_groups:
            group["lr"] = self._adam_lr * lr_factor
        self._adam.step()
        for parameter in self._parameters:
            parameter.grad = None
        return norm
