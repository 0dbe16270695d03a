"""Megatron without a GPU: what it asks of CUDA is answered for the CPU, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def cpu_mode() -> Iterator[None]:
    """Inside, the current CUDA device is the CPU; outside, all is as it was.

    Megatron moves its RoPE frequencies to `torch.cuda.current_device()` at the first forward.
    """
    with patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
        yield
