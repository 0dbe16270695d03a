"""The decoder by its formulas: one sequence alone, so there is nothing to mask but the future.

Shapes: L tokens of the sequence, V vocabulary.

Everything is calculated in the dtype of the weights, except angles, norms, softmax and the
scores of experts, which are float64 whatever the weights are. With float64 weights this is the
oracle; with bfloat16 weights it shows the error that rounding alone makes.
"""

from collections.abc import Mapping

from torch import Tensor

from . import attention, mla, moe
from .config import ModelConfig
from .layers import mlp, norm, softcap


def logits(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    input_ids: Tensor,
    *,
    routers: moe.Routers | None = None,
) -> Tensor:
    """Logits of the next token at every position of one sequence.

    Args:
        weights: as `weight_shapes(config)` names them, float64.
        input_ids: int64 [L].
        routers: takes down what the routers say.
    Returns:
        float64 [L, V], with a graph to the weights that need gradients.
    """
    hidden = hidden_states(weights, config, input_ids, routers=routers)
    return head(weights, config, norm(weights, config, "model.norm", hidden))


def hidden_states(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    input_ids: Tensor,
    *,
    routers: moe.Routers | None = None,
) -> Tensor:
    """The stream after the last decoder layer, before the final norm, [L, hidden]."""
    hidden = embed(weights, config, input_ids)
    for layer in range(config.num_layers):
        own = below(weights, f"model.layers.{layer}.")
        hidden = decoder_layer(own, config, layer, hidden, routers=routers)
    return hidden


def embed(weights: Mapping[str, Tensor], config: ModelConfig, input_ids: Tensor) -> Tensor:
    """What goes into the first layer, [L, hidden]."""
    return weights["model.embed_tokens.weight"][input_ids] * config.embedding_scale


def decoder_layer(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    layer: int,
    hidden: Tensor,
    *,
    routers: moe.Routers | None = None,
) -> Tensor:
    """One layer, [L, hidden] to [L, hidden].

    Args:
        weights: of the layer, their names without `model.layers.` and its number.
        layer: counted from 0; those from `num_layers` on are of MTP.
    Source: norms before attention and MLP as in On Layer Normalization in the Transformer
        Architecture (arXiv:2002.04745); after them too as in Gemma 2 (arXiv:2408.00118).
    """
    attend = attention.attention if config.mla is None else mla.attention
    x = norm(weights, config, "input_layernorm", hidden)
    x = attend(weights, config, layer, x)
    if config.post_norms:
        x = norm(weights, config, "post_attention_layernorm", x)
    hidden = hidden + x

    before = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    x = norm(weights, config, before, hidden)
    if config.has_experts(layer):
        x = moe.experts(weights, config, x, routers)
    else:
        x = mlp(weights, config, x)
    if config.post_norms:
        x = norm(weights, config, "post_feedforward_layernorm", x)
    return hidden + x


def head(weights: Mapping[str, Tensor], config: ModelConfig, hidden: Tensor) -> Tensor:
    """Logits [L, V] of what a final norm gave, [L, hidden]."""
    matrix = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    return softcap(hidden @ weights[matrix].T, config.logit_softcap)


def below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights whose names start with `prefix`, without it."""
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
