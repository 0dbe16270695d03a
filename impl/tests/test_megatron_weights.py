"""Weights between Hugging Face names and Megatron's: nothing lost, and rows where they belong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from impl.megatron.model import GPTConfig

pytestmark = pytest.mark.usefixtures("megatron")

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 40,
    "vocab_size": 53,
}
BIASES = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi_query": {"num_kv_heads": 1},
    "multi_head": {"num_kv_heads": 4},
    "wide_heads": {"head_dim": 16},
    "qk_norm": {"qk_norm": True},
    "qkv_bias": {"qkv_bias": True},
    "all_biases": BIASES,
    "tied": {"tied": True},
    "layernorm": {"norm": "layernorm"},
    "gelu": {"activation": "gelu"},
    "everything": {"norm": "layernorm", "activation": "gelu_tanh", "tied": True, **BIASES},
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def _config(**changes: Any) -> GPTConfig:
    from impl.megatron.model import GPTConfig

    return GPTConfig(**{**SIZES, **changes})


def _shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of a decoder LM under its Hugging Face name, written down by hand."""
    c = config
    norm = ["weight", "bias"] if c.norm == "layernorm" else ["weight"]
    linear = {
        "self_attn.q_proj": (c.num_heads * c.head_dim, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (c.num_kv_heads * c.head_dim, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (c.num_kv_heads * c.head_dim, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, c.num_heads * c.head_dim, c.attention_out_bias),
    }
    if c.activation == "swiglu":
        linear |= {
            "mlp.gate_proj": (c.ffn_size, c.hidden_size, c.mlp_bias),
            "mlp.up_proj": (c.ffn_size, c.hidden_size, c.mlp_bias),
            "mlp.down_proj": (c.hidden_size, c.ffn_size, c.mlp_bias),
        }
    else:
        linear |= {
            "mlp.c_fc": (c.ffn_size, c.hidden_size, c.mlp_bias),
            "mlp.c_proj": (c.hidden_size, c.ffn_size, c.mlp_bias),
        }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size)
    }
    for layer in (f"model.layers.{number}" for number in range(c.num_layers)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{layer}.{name}.{kind}": (c.hidden_size,) for kind in norm}
        if c.qk_norm:
            shapes |= {
                f"{layer}.self_attn.{name}.weight": (c.head_dim,) for name in ("q_norm", "k_norm")
            }
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            shapes |= {f"{layer}.{name}.bias": (rows,)} if bias else {}
    shapes |= {f"model.norm.{kind}": (c.hidden_size,) for kind in norm}
    return shapes if c.tied else {**shapes, "lm_head.weight": (c.vocab_size, c.hidden_size)}


def _weights(config: GPTConfig) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=draw)
        for name, shape in _shapes(config).items()
    }


def _loaded(config: GPTConfig, weights: dict[str, Tensor]) -> torch.nn.Module:
    from impl.megatron.model import build_gpt_model
    from impl.megatron.weights import load_hf_weights

    model: torch.nn.Module = build_gpt_model(config, max_seqlen=16)
    load_hf_weights(model, weights, config)
    return model


@EVERY_VARIANT
def test_round_trip_gives_every_weight_back_bit_for_bit(variant) -> None:
    from impl.megatron.weights import to_hf

    config = _config(**variant)
    weights = _weights(config)
    model = _loaded(config, weights)
    back = to_hf(dict(model.named_parameters()), config)

    assert set(back) == set(weights)
    assert [name for name in weights if not torch.equal(back[name], weights[name])] == []


@EVERY_VARIANT
def test_gradients_take_the_way_of_the_weights(variant) -> None:
    from impl.megatron.weights import hf_gradients

    config = _config(**variant)
    weights = _weights(config)
    model = _loaded(config, weights)
    for parameter in model.parameters():
        parameter.grad = 2 * parameter.detach()
    gradients = hf_gradients(model, config)

    assert set(gradients) == set(weights)
    assert [name for name in weights if not torch.equal(gradients[name], 2 * weights[name])] == []


def test_gradient_that_never_arrived_is_zero() -> None:
    from impl.megatron.weights import hf_gradients

    config = _config()
    gradients = hf_gradients(_loaded(config, _weights(config)), config)

    assert {name: tuple(gradient.shape) for name, gradient in gradients.items()} == _shapes(config)
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_q_k_and_v_of_one_kv_head_lie_side_by_side(kind) -> None:
    config = _config(**BIASES)  # 4 heads of 8 share 2 KV heads
    weights = _weights(config)
    fused = dict(_loaded(config, weights).named_parameters())[
        f"decoder.layers.1.self_attention.linear_qkv.{kind}"
    ]
    q, k, v = (weights[f"model.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv")

    expected = torch.cat([q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]])
    assert torch.equal(fused, expected)


def test_gate_lies_on_top_of_up() -> None:
    config = _config()
    weights = _weights(config)
    fused = dict(_loaded(config, weights).named_parameters())[
        "decoder.layers.0.mlp.linear_fc1.weight"
    ]
    gate, up = (weights[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))

    assert torch.equal(fused, torch.cat([gate, up]))


def test_output_matrix_of_a_tied_model_is_the_embedding() -> None:
    config = _config(tied=True)
    weights = _weights(config)
    model: Any = _loaded(config, weights)

    assert torch.equal(
        model.shared_embedding_or_output_weight(), weights["model.embed_tokens.weight"]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"),
            "no weight for model.layers.1.self_attn.k_proj.weight, which "
            "decoder.layers.1.self_attention.linear_qkv.weight needs",
        ),
        (
            lambda weights: weights.update({"model.extra": torch.ones(1), "a": torch.ones(1)}),
            "weights that no parameter takes: a, model.extra",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(23)}),
            "model.norm.weight make (23,), decoder.final_layernorm.weight is (24,)",
        ),
    ],
    ids=["missing", "left_over", "other_shape"],
)
def test_weights_that_do_not_fit_are_refused_by_name(change, words) -> None:
    config = _config()
    weights = _weights(config)
    change(weights)
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        _loaded(config, weights)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "batchnorm"}, "norm='batchnorm' must be one of rmsnorm, layernorm and "),
        ({"activation": "relu"}, "activation='relu' one of swiglu, geglu_tanh"),
        ({"mlp_bias": True}, "Megatron has all three, the first alone, or none"),
        ({"attention_out_bias": True, "mlp_bias": True}, "Megatron has all three"),
        ({"qk_norm": True, "norm": "layernorm"}, "qk_norm=True needs norm='rmsnorm'"),
    ],
)
def test_model_that_megatron_cannot_build_is_refused(changes, words) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        _config(**changes)


def test_rope_frequencies_are_float64_of_the_share_that_rotates() -> None:
    from impl.megatron.rope import rope_frequencies

    frequencies = rope_frequencies(_config(rope_fraction=0.5, rope_theta=100.0))

    assert frequencies.dtype == torch.float64
    assert frequencies.tolist() == [1, 100.0**-0.5]
