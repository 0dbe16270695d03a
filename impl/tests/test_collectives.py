"""Gathers and their gradients on four gloo processes, against gradients worked out on paper.

Each member's loss is a sum of weight times the square of what it gathered, so the gradient of a
part is twice the part times the weights that its rows have: on this member if all members go on
alike, summed over members if they do not.
"""

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from impl.tests.gather_gradients import (
    GROUPS,
    ROWS,
    WORLD,
    different_weights,
    one_has_a_loss,
    part_of,
    run_rank,
    shared_weights,
)

EVERYWHERE = pytest.mark.parametrize("members", GROUPS, ids=str)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of every rank: group → scenario → what it gathered and its gradient."""
    folder = tmp_path_factory.mktemp("gathers")
    start_processes(run_rank, (str(folder),), nprocs=WORLD, start_method="spawn")
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(WORLD)]


def _rows_of(weights, place):
    return weights[place * ROWS : (place + 1) * ROWS]


@EVERYWHERE
@pytest.mark.parametrize("name", ["replicated", "distinct"])
def test_parts_lie_in_group_order_on_every_member(results, members, name) -> None:
    expected = torch.cat([part_of(rank) for rank in members])
    for rank in members:
        assert torch.equal(results[rank][members][name][0], expected)


@EVERYWHERE
def test_gather_takes_what_is_not_contiguous_and_keeps_its_type(results, members) -> None:
    expected = torch.cat([part_of(rank).long().t() for rank in members])
    for rank in members:
        assert torch.equal(results[rank][members]["all_gather"], expected)


@EVERYWHERE
def test_replicated_loss_counts_once(results, members) -> None:
    weights = shared_weights(len(members), 0)
    for place, rank in enumerate(members):
        expected = 2 * part_of(rank) * _rows_of(weights, place)
        assert torch.equal(results[rank][members]["replicated"][1], expected)


@EVERYWHERE
@pytest.mark.parametrize(
    ("name", "weights_of"),
    [
        ("distinct", different_weights),
        ("distinct_alike", shared_weights),
        ("distinct_on_one", one_has_a_loss),
    ],
)
def test_losses_of_all_members_add_up(results, members, name, weights_of) -> None:
    weights = sum(weights_of(len(members), place) for place in range(len(members)))
    for place, rank in enumerate(members):
        expected = 2 * part_of(rank) * _rows_of(weights, place)
        assert torch.equal(results[rank][members][name][1], expected)
