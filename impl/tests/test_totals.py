"""What a loss function may return, and what becomes of it."""

import re

import pytest
import torch
import torch.distributed as dist

from impl.plan import GroupPlan, MicroBatchPlan, Plan
from impl.totals import Parts, parts_of, totals

PACKS = tuple(MicroBatchPlan((GroupPlan((0,), (sample,)),)) for sample in range(2))
PLAN = Plan(1, (3, 4), PACKS, "by hand", barriered=True)


def _total(*parts: Parts) -> Parts:
    group = dist.group.WORLD
    assert group is not None
    return totals(parts, plan=PLAN, dp_cp_group=group, device=torch.device("cpu"))


@pytest.mark.usefixtures("megatron")
def test_metrics_are_added_up_by_name_beside_the_loss() -> None:
    first = parts_of(torch.tensor([1.0]), {"loss": 10, "b": 0.5}, is_padding=False)
    second = parts_of(torch.tensor(2.0), {"b": torch.tensor(2), "loss": 20}, is_padding=False)
    padding = parts_of(torch.tensor(4.0), {"other": 1}, is_padding=True)
    total = _total(first, second, padding)

    assert total.loss == 3
    assert {name: float(value) for name, value in total.metrics.items()} == {"b": 2.5, "loss": 30}


@pytest.mark.usefixtures("megatron")
def test_packs_of_different_metrics_are_refused() -> None:
    words = "the loss function returned metrics ['b'] of one pack and ['a'] of another; return"
    with pytest.raises(ValueError, match=re.escape(words)):
        _total(*(parts_of(0.0, {name: 1}, is_padding=False) for name in "ab"))


def test_nothing_that_a_pack_of_padding_returned_is_left() -> None:
    nan = torch.tensor(float("nan"))
    parts = parts_of(nan, {"mean": nan}, is_padding=True)

    assert parts.loss == 0
    assert parts.metrics["mean"] == 0


@pytest.mark.parametrize("value", [None, torch.ones(2), "1"])
def test_what_is_not_one_number_is_refused_by_name(value) -> None:
    for loss, metrics, what in ((value, {}, "the loss"), (0.0, {"kl": value}, "metric kl")):
        with pytest.raises(ValueError, match=f"^{what} is .*returns one number for each$"):
            parts_of(loss, metrics, is_padding=False)


def test_report_holds_no_graph() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    assert not parts_of(loss, {"kl": loss}, is_padding=False).detached.loss.requires_grad
