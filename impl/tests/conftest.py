"""Megatron in one process, set up once for all tests that need it, and a profile for long runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import settings

settings.register_profile("deep", max_examples=5000, derandomize=False, deadline=None)


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Model-parallel state of a world of one rank on the CPU; skips where Megatron is missing."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from impl.megatron.cpu import cpu_mode
    from impl.megatron.parallel import model_parallel

    store = f"file://{tmp_path_factory.mktemp('megatron') / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    with model_parallel(), cpu_mode():
        yield
    dist.destroy_process_group()
