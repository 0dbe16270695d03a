"""The same training by definition: the oracle's gradients, torch's Adam, one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from reference import Batch, Loss, ModelConfig, evaluate

from .data import Documents
from .settings import Adam


def train_reference(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    optimizer: Adam,
    batches: Iterable[Documents],
) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """The loss of each step, and the weights after it."""
    weights = {name: weight.clone() for name, weight in weights.items()}
    adam = _adam(weights, optimizer)
    for batch in batches:
        ids = tuple(document.ids for document in batch)
        masks = tuple(document.mask for document in batch)
        result = evaluate(model, weights, Batch(ids, masks, (1.0,) * len(batch)), Loss())
        factor = _clip_factor(result.gradients, optimizer.clip_grad)
        for name, weight in weights.items():
            weight.grad = result.gradients[name] * factor
        adam.step()
        yield float(result.loss), weights


def _adam(weights: Mapping[str, Tensor], settings: Adam) -> torch.optim.Optimizer:
    """Norms and biases, the weights of one dim, do not decay: so it is in Megatron."""
    kind = torch.optim.AdamW if settings.decoupled_weight_decay else torch.optim.Adam
    return kind(
        [
            {
                "params": [weight for weight in weights.values() if weight.dim() > 1],
                "weight_decay": settings.weight_decay,
            },
            {
                "params": [weight for weight in weights.values() if weight.dim() == 1],
                "weight_decay": 0.0,
            },
        ],
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
    )


def _clip_factor(gradients: Mapping[str, Tensor], clip_grad: float) -> float:
    """What makes the norm of all gradients together at most `clip_grad`."""
    norm = float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm())
    return min(1.0, clip_grad / (norm + 1e-6)) if clip_grad else 1.0
