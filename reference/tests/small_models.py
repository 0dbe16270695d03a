"""Small models and batches that together use every option."""

from collections.abc import Sequence

import torch

from reference import Batch, ModelConfig

VOCAB_SIZE = 53


def small_config(**changes: object) -> ModelConfig:
    sizes = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_size": 40,
        "vocab_size": VOCAB_SIZE,
    }
    return ModelConfig(**{**sizes, **changes})  # type: ignore[arg-type]


CONFIGS = {
    "default": small_config(),
    "one_layer": small_config(num_layers=1),
    "layernorm": small_config(norm="layernorm"),
    "large_eps": small_config(norm_eps=0.1),
    "layernorm_large_eps": small_config(norm="layernorm", norm_eps=0.1),
    "gelu": small_config(activation="gelu"),
    "gelu_tanh": small_config(activation="gelu_tanh"),
    "rope_interleaved": small_config(rope_interleaved=True),
    "rope_partial": small_config(rope_fraction=0.5),
    "rope_partial_interleaved": small_config(rope_fraction=0.25, rope_interleaved=True),
    "rope_theta": small_config(rope_theta=100.0),
    "multi_head": small_config(num_kv_heads=4),
    "multi_query": small_config(num_kv_heads=1),
    "wide_heads": small_config(head_dim=16),
    "qk_norm": small_config(qk_norm=True),
    "qkv_bias": small_config(qkv_bias=True),
    "attention_out_bias": small_config(attention_out_bias=True),
    "mlp_bias": small_config(mlp_bias=True),
    "gelu_bias": small_config(activation="gelu", mlp_bias=True),
    "tied": small_config(tied=True),
    "everything": small_config(
        norm="layernorm",
        activation="gelu_tanh",
        rope_interleaved=True,
        rope_fraction=0.5,
        qk_norm=True,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied=True,
    ),
}


def random_batch(
    seqlens: Sequence[int],
    *,
    seed: int = 0,
    masked: float = 0.3,
    temperature: Sequence[float] | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> Batch:
    """Random ids and weights; each token is left out of the loss with probability `masked`."""
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        input_ids=tuple(
            torch.randint(vocab_size, (length,), generator=generator) for length in seqlens
        ),
        loss_mask=tuple(torch.rand(length, generator=generator) >= masked for length in seqlens),
        temperature=tuple(temperature or [1.0] * len(seqlens)),
        loss_weights=tuple(_random_loss_weights(length, generator) for length in seqlens),
    )


def _random_loss_weights(seqlen: int, generator: torch.Generator) -> torch.Tensor:
    """Loss weights of both signs; the last token predicts nothing."""
    weights = torch.randn(seqlen, generator=generator, dtype=torch.float64)
    weights[-1] = 0
    return weights
