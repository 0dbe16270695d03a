"""What model the oracle is: its shape, its options, and its weights by Hugging Face name."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

NORMS = ("rmsnorm", "layernorm")
ACTIVATIONS = ("swiglu", "gelu", "gelu_tanh")
_SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_size",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder language model with rotary positions and grouped-query attention.

    Attributes:
        num_kv_heads: equal to `num_heads` for multi-head attention, 1 for multi-query.
        norm: `rmsnorm`, or `layernorm` with a bias.
        activation: `swiglu` is gated; `gelu` (exact) and `gelu_tanh` are not.
        rope_interleaved: which two dims turn together: i and i + half (Llama, GPT-NeoX) when
            False, 2i and 2i + 1 (GPT-J) when True.
        rope_fraction: the first `int(head_dim * rope_fraction)` dims turn, the others stay.
        qk_norm: RMSNorm over `head_dim` on queries and keys before they turn (Qwen3).
        tied: the output matrix is the embedding, and there is no `lm_head.weight`.
    Raises:
        ValueError: an option that is unknown, or sizes that do not fit each other.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    activation: str = "swiglu"
    rope_theta: float = 10000.0
    rope_interleaved: bool = False
    rope_fraction: float = 1.0
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dims turn with the position."""
        return int(self.head_dim * self.rope_fraction)

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}; every KV head serves equally many query heads"
            )
        if self.norm not in NORMS:
            raise ValueError(f"norm={self.norm!r} is unknown; choose one of {', '.join(NORMS)}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation={self.activation!r} is unknown; "
                f"choose one of {', '.join(ACTIVATIONS)}"
            )
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be positive and finite")
        if not 0 < self.rope_fraction <= 1:
            raise ValueError(f"rope_fraction={self.rope_fraction} must be above 0 and at most 1")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"rope_fraction={self.rope_fraction} turns {self.rotary_dim} of "
                f"head_dim={self.head_dim} dims; dims turn in pairs, so make that even, 2 or more"
            )


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight's Hugging Face name and shape, in the order the model uses them.

    A matrix is [outputs, inputs], as `torch.nn.Linear` stores it. A tied model has no
    `lm_head.weight`. An ungated MLP has the names of Starcoder2 (`c_fc`, `c_proj`).

    >>> config = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=1,
    ...                      head_dim=4, ffn_size=16, vocab_size=32)
    >>> weight_shapes(config)["model.layers.0.self_attn.k_proj.weight"]
    (4, 8)
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes.update(_norm_shapes(config, "model.norm"))
    if not config.tied:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = config.hidden_size, config.ffn_size
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    yield from _norm_shapes(config, "input_layernorm")
    yield from _linear_shapes("self_attn.q_proj", heads, hidden, bias=config.qkv_bias)
    yield from _linear_shapes("self_attn.k_proj", kv_heads, hidden, bias=config.qkv_bias)
    yield from _linear_shapes("self_attn.v_proj", kv_heads, hidden, bias=config.qkv_bias)
    yield from _linear_shapes("self_attn.o_proj", hidden, heads, bias=config.attention_out_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield from _norm_shapes(config, "post_attention_layernorm")
    if config.activation == "swiglu":
        yield from _linear_shapes("mlp.gate_proj", ffn, hidden, bias=config.mlp_bias)
        yield from _linear_shapes("mlp.up_proj", ffn, hidden, bias=config.mlp_bias)
        yield from _linear_shapes("mlp.down_proj", hidden, ffn, bias=config.mlp_bias)
    else:
        yield from _linear_shapes("mlp.c_fc", ffn, hidden, bias=config.mlp_bias)
        yield from _linear_shapes("mlp.c_proj", hidden, ffn, bias=config.mlp_bias)


def _norm_shapes(config: ModelConfig, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.norm == "layernorm":
        yield f"{name}.bias", (config.hidden_size,)


def _linear_shapes(
    name: str, outputs: int, inputs: int, *, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def random_weights(config: ModelConfig, *, seed: int, std: float = 0.15) -> dict[str, Tensor]:
    """Weights with which a mistake shows: the same for the same seed, float64, on the CPU.

    Matrices are normal with `std`; at 0.15 attention is neither flat nor one-hot at widths
    of 64 to 128, so a wrong mask or position moves the logits. Norm weights vary around 1 and
    biases around 0, so that leaving one out moves them too.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith(".bias"):
            weights[name] = 0.1 * normal
        elif name.endswith("norm.weight"):
            weights[name] = 1 + 0.2 * normal
        else:
            weights[name] = std * normal
    return weights


def check_weights(
    config: ModelConfig, weights: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float64
) -> None:
    """Require exactly the weights of `config`, in `dtype`.

    Raises:
        ValueError: a weight that is missing, unknown, of another shape or of another dtype.
    """
    shapes = weight_shapes(config)
    missing = [name for name in shapes if name not in weights]
    if missing:
        raise ValueError(
            f"weights lack {', '.join(missing)}; weight_shapes(config) lists them all"
        )
    extra = [name for name in weights if name not in shapes]
    if extra:
        raise ValueError(f"this model has no {', '.join(extra)}; drop them or change the config")
    for name, shape in shapes.items():
        weight = weights[name]
        if tuple(weight.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, the config needs {shape}")
        if weight.dtype != dtype:
            raise ValueError(f"{name} is {weight.dtype}, not {dtype}; convert every weight to it")
