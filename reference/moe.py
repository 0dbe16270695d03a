"""Mixture of experts: which experts every token goes to, and what they give back.

Shapes: L tokens of the sequence, E experts, K experts of a token (`top_k`).

Scores are float64 whatever the weights are, as softmax is elsewhere.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .config import ModelConfig, MoE
from .layers import linear, mlp


@dataclass
class Routers:
    """What the routers of one sequence said, layer after layer, and what they are told.

    Attributes:
        told: int64 [L, layers with experts, K], the experts that tokens go to whatever the
            routers say; None lets them choose.
        logits: [L, E] of every layer so far, with a graph.
        chosen: int64 [L, K] of every layer so far, ascending.
    """

    told: Tensor | None = None
    logits: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)


def experts(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    x: Tensor,
    routers: Routers | None = None,
) -> Tensor:
    """The experts of one layer in place of its MLP, [L, hidden] to [L, hidden].

    Every token goes through K experts and the sum of what they give is weighted by their
    scores; an expert that is shared gets every token and weighs 1.

    Args:
        weights: of the layer, `mlp.gate.weight` and so on.
        routers: takes down what the router says and which experts it chooses.
    Source: Outrageously Large Neural Networks (arXiv:1701.06538), section 2; a shared expert
        as in DeepSeekMoE (arXiv:2401.06066), section 3.2.
    """
    moe = _of(config)
    routers = Routers() if routers is None else routers
    logits = linear(weights, "mlp.gate", x)
    if routers.told is None:
        chosen = choose(moe, logits, weights.get("mlp.gate.e_score_correction_bias"))
    else:
        chosen = routers.told[:, len(routers.chosen)].to(x.device).sort(-1).values
    routers.logits.append(logits)
    routers.chosen.append(chosen)

    weight = expert_weights(moe, logits, chosen).to(x.dtype)
    total = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        given = mlp(weights, config, x[token], f"mlp.experts.{expert}")
        total = total.index_add(0, token, weight[token, place, None] * given)
    if moe.shared_ffn_size:
        total = total + mlp(weights, config, x, "mlp.shared_experts")
    return total


def scores(moe: MoE, logits: Tensor) -> Tensor:
    """What experts are chosen by, before any bias: float64 [L, E].

    Softmax over the chosen ones alone keeps the order of the logits, so there it is them.
    """
    logits = logits.double()
    if moe.score == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if moe.score == "sigmoid" else logits


@torch.no_grad()
def choose(moe: MoE, logits: Tensor, bias: Tensor | None = None) -> Tensor:
    """The experts that every token goes to.

    A group is as good as its two best experts together, and only experts of the best groups
    can be chosen.

    Args:
        logits: [L, E].
        bias: [E], added to the scores for the choice alone.
    Returns:
        int64 [L, K], ascending.
    Source: DeepSeek-V3 (arXiv:2412.19437), equation 16 and section 2.1.2, "Node-Limited
        Routing".
    """
    goodness = scores(moe, logits)
    if bias is not None:
        goodness = goodness + bias.double()
    if moe.num_groups > 1:
        in_groups = goodness.view(len(goodness), moe.num_groups, -1)
        best = in_groups.topk(2).values.sum(-1).topk(moe.top_groups).indices
        is_open = torch.zeros_like(in_groups[..., 0], dtype=torch.bool).scatter(1, best, True)
        goodness = in_groups.masked_fill(~is_open[..., None], -math.inf).flatten(1)
    return goodness.topk(moe.top_k).indices.sort(-1).values


def expert_weights(moe: MoE, logits: Tensor, chosen: Tensor) -> Tensor:
    """What the chosen experts weigh, float64 [L, K]; no bias for the choice is in it."""
    of_chosen = scores(moe, logits).gather(1, chosen)
    if moe.score == "softmax_after":
        of_chosen = of_chosen.softmax(-1)
    if moe.normalise:
        of_chosen = of_chosen / (of_chosen.sum(-1, keepdim=True) + 1e-20)
    return of_chosen * moe.routed_scale


def _of(config: ModelConfig) -> MoE:
    assert config.moe is not None
    return config.moe
