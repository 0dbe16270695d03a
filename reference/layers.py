"""The parts of a layer that see one token at a time: linear maps, norms and the MLP.

Norms are calculated in float64 whatever the weights are.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .config import GATED, ModelConfig


def linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """x W^T, plus the bias where the model has one."""
    product = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return product if bias is None else product + bias


def norm(weights: Mapping[str, Tensor], config: ModelConfig, name: str, x: Tensor) -> Tensor:
    """The norm that `config` asks for, over the last dim of `x`, scaled by its own weights.

    Source: LayerNorm (arXiv:1607.06450).
    """
    if config.norm == "rmsnorm":
        return rms_norm(weights, config, name, x)
    centred = x - x.double().mean(-1, keepdim=True)
    scaled = over_root_mean_square(centred, config.norm_eps).to(x.dtype)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rms_norm(weights: Mapping[str, Tensor], config: ModelConfig, name: str, x: Tensor) -> Tensor:
    """RMSNorm over the last dim of `x`; heads and latent vectors have it whatever the norm is.

    Source: RMSNorm (arXiv:1910.07467); 1 plus the weight as in Gemma (arXiv:2403.08295).
    """
    weight = weights[f"{name}.weight"]
    scaled = over_root_mean_square(x, config.norm_eps)
    return scaled * (1 + weight if config.norm_zero_centred else weight)


def over_root_mean_square(x: Tensor, eps: float) -> Tensor:
    """x divided by the root of its mean square, over the last dim."""
    mean_square = x.double().square().mean(-1, keepdim=True)
    return (x / torch.sqrt(mean_square + eps)).to(x.dtype)


def mlp(
    weights: Mapping[str, Tensor], config: ModelConfig, x: Tensor, name: str = "mlp"
) -> Tensor:
    """A feed-forward network, [L, hidden] to [L, hidden].

    Args:
        name: what its weights' names begin with; an expert is one too.
    Source: GLU Variants Improve Transformer (arXiv:2002.05202) for the gated ones.
    """
    if config.activation in GATED:
        gate, up = linear(weights, f"{name}.gate_proj", x), linear(weights, f"{name}.up_proj", x)
        return linear(weights, f"{name}.down_proj", gated(config.activation, gate, up))
    activation = gelu if config.activation == "gelu" else gelu_tanh
    return linear(weights, f"{name}.c_proj", activation(linear(weights, f"{name}.c_fc", x)))


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """What the gate lets through.

    Source: SwiGLU and GEGLU in arXiv:2002.05202, equation 6; the clamped SwiGLU, whose sigmoid is
        steeper and whose `up` is moved by 1, in the gpt-oss model card (arXiv:2508.10925) and its
        published code.
    """
    if activation == "swiglu":
        return gate * torch.sigmoid(gate) * up
    if activation == "geglu_tanh":
        return gelu_tanh(gate) * up
    assert activation == "swiglu_clamped"
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution function of x. Source: arXiv:1606.08415, section 2."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    """The approximation of `gelu` by tanh. Source: arXiv:1606.08415, section 2."""
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def softcap(x: Tensor, cap: float) -> Tensor:
    """x, bent so that it stays between -cap and cap; 0 for no cap.

    Source: Gemma 2 (arXiv:2408.00118), section 2, "Logit soft-capping".
    """
    return cap * torch.tanh(x / cap) if cap else x
