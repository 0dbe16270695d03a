"""Megatron's state is one for all, and nothing of it stays behind."""

import pytest
import torch

from impl.layout import pack_layout, rank_index

pytestmark = pytest.mark.usefixtures("megatron")


def test_second_state_is_refused_and_leaves_the_first_alone() -> None:
    from megatron.core import parallel_state

    from impl.megatron.parallel import model_parallel
    from impl.parallel import ParallelLayout

    group = parallel_state.get_data_parallel_group()
    with (
        pytest.raises(ValueError, match=r"^Megatron's model-parallel state is open already"),
        model_parallel(ParallelLayout(static_cp_size=1)),
    ):
        pass

    assert parallel_state.get_data_parallel_group() is group


def test_index_maps_made_in_inference_serve_training() -> None:
    pack_layout.cache_clear()
    rank_index.cache_clear()
    with torch.inference_mode():
        index = rank_index((3, 2), cp_size=2, cp_rank=0)

    assert not index.rows.is_inference()
    assert not index.token_slots.is_inference()
