"""Modelled time of a pack: what a scheduler compares. Not a measurement.

The defaults are those of a dense model of about 8 billion parameters (36 layers, hidden size 4096,
8 KV heads) in bf16, forward and backward, at 790 TFLOP/s in matrix products, 500 in attention and
450 GB/s to the next rank. Only their ratios matter to a plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


def sample_seconds(
    tokens: NDArray[np.int64],
    *,
    cp_size: int,
    linear: float = 5.8e-5,
    attention: float = 1.8e-9,
    exchange: float = 9.8e-7,
    merge: float = 9.6e-7,
) -> Seconds:
    """What each sample costs every rank of its group, apart from the launches of its pack.

    Args:
        tokens: padded length of each sample.
        linear: of a token in the matrix products. attention: of a token, for each token of its
            sequence. exchange: to pass on a token's K and V and their gradients, hidden behind
            attention where that takes longer. merge: to re-read and merge a token's partial
            results once for each further rank.
    """
    shard = tokens / cp_size
    ring = shard * (cp_size - 1)
    return linear * shard + np.maximum(attention * shard * tokens, exchange * ring) + merge * ring


def pack_seconds(
    work: float, *, cp_size: int, launch: float = 3e-2, latency: float = 1.1e-3
) -> float:
    """What a pack costs every rank of its group.

    Args:
        work: sum over its samples of `sample_seconds`.
        launch: no pack is faster. latency: of one step round the ring.
    """
    return max(launch, work + latency * (cp_size - 1))
