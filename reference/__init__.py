"""The oracle: what is right, in float64, in one process, with torch alone."""

from .batch import Batch, Loss, Result
from .config import MLA, ModelConfig, MoE, RopeScaling
from .evaluate import evaluate
from .groups import choose_local_cp_size, split
from .model import logits
from .outputs import entropy, logprobs
from .packed import evaluate_packed
from .weights import check_weights, random_weights, weight_shapes
from .zigzag import (
    alignment,
    next_token_labels,
    packed_positions,
    packed_rows,
    packed_tokens,
    padded_length,
    unpack,
)

__all__ = [
    "MLA",
    "Batch",
    "Loss",
    "MoE",
    "ModelConfig",
    "Result",
    "RopeScaling",
    "alignment",
    "check_weights",
    "choose_local_cp_size",
    "entropy",
    "evaluate",
    "evaluate_packed",
    "logits",
    "logprobs",
    "next_token_labels",
    "packed_positions",
    "packed_rows",
    "packed_tokens",
    "padded_length",
    "random_weights",
    "split",
    "unpack",
    "weight_shapes",
]
