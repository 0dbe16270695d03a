"""Every cell of the table of factors, against what the installed Megatron does to a gradient."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import impl.scale
from impl.scale import MAIN_ROAD, Counts, Road, loss_factor

ROADS = [
    Road(num_values=values, per_token=per_token, ddp_averages=averages)
    for values, per_token, averages in product((2, 3), (True, False), (True, False))
    if not (per_token and averages)
]


@dataclass(frozen=True)
class Rank:
    """Per micro-batch the tokens that a rank counts and its part of the loss."""

    tokens: tuple[int, ...]
    parts: tuple[float, ...]


STEPS = {
    "even": [Rank((4, 4), (1.0, 2.0)), Rank((4, 4), (3.0, 4.0))],
    "uneven": [
        Rank((1, 9, 5), (1.0, -2.0, 0.5)),
        Rank((7,), (3.0,)),
        Rank((2, 2), (8.0, 0.0)),
        Rank((3,), (-1.5,)),
    ],
    "no_token": [Rank((0, 5), (0.0, 2.0)), Rank((0, 0), (0.0, 0.0))],
    "nothing": [Rank((0,), (0.0,)), Rank((0,), (0.0,))],
}
WAYS = [
    pytest.param(road, in_collective, id=f"{road}{' in_collective' * in_collective}")
    for road in ROADS
    for in_collective in ((False, True) if road.ddp_averages else (False,))
]


@dataclass(frozen=True)
class Group:
    """A process group of which only the size is asked."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


class Model(torch.nn.Module):
    """The loss is its one weight times a number."""

    def __init__(self, config) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def set_input_tensor(self, _) -> None: ...

    def forward(self):
        return self.weight * 1


@contextmanager
def _collectives(over: Group, total_tokens: int) -> Iterator[list[dist.ReduceOp]]:
    """One rank's share of every reduction over a group that is not there.

    Reductions of gradients are linear, so the test adds up what each rank contributes; the sum of
    the tokens is known to it, and is 0 where loss functions return no number of tokens.
    """
    from megatron.core.distributed import param_and_grad_buffer

    ops: list[dist.ReduceOp] = []

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        assert (group, async_op) == (over, False)
        if not tensor.is_floating_point():
            tensor.fill_(total_tokens)
            return
        ops.append(op)
        if op == dist.ReduceOp.AVG:
            tensor /= group.size()

    with (
        patch.object(dist, "all_reduce", all_reduce),
        patch.object(param_and_grad_buffer, "_coalescing_manager", lambda *_, **__: nullcontext()),
    ):
        yield ops


def _groups(*, num_ranks: int, static_cp_size: int):
    """Megatron's groups of a world of one, with DP×CP and CP groups of other sizes."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    for name in ("dp", "dp_cp", "intra_dp_cp", "dp_cp_gtp_remat"):
        setattr(groups, name, Group(num_ranks))
    groups.cp = Group(static_cp_size)
    return groups


def _model(road: Road, groups, *, in_collective: bool):
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    config.calculate_per_token_loss = road.per_token
    if not (road.per_token or road.ddp_averages):
        return Model(config)  # no data parallelism of Megatron's
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(average_in_collective=in_collective)
    model = DistributedDataParallel(config, ddp, Model(config), pg_collection=groups)
    config.no_sync_func = model.no_sync
    return model


def _forward_step(road: Road, micro_batches, model):
    part, counts = next(micro_batches)

    def loss_function(output):
        loss = output * part * loss_factor(road, counts)
        tokens = torch.tensor(counts.local_tokens, dtype=torch.int32)
        return (loss, None) if road.num_values == 2 else (loss, tokens, None)

    return model(), loss_function


def _share(road: Road, rank: Rank, counts: list[Counts], *, total: int, in_collective: bool):
    """What a rank contributes to the gradient of the weight, and how it is reduced.

    The schedule, what it does to the loss, data parallelism and `finalize_model_grads` are those
    of the installed Megatron.
    """
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron.core.transformer import multi_token_prediction  # noqa: F401, it compiles

    from impl.megatron.cpu import cpu_training_mode

    groups = _groups(num_ranks=counts[0].num_ranks, static_cp_size=counts[0].static_cp_size)
    counted = total if road.num_values == 3 else 0
    with cpu_training_mode(), _collectives(groups.dp_cp, counted) as ops:
        model = _model(road, groups, in_collective=in_collective)
        forward_backward_no_pipelining(
            forward_step_func=partial(_forward_step, road),
            data_iterator=iter(list(zip(rank.parts, counts, strict=True))),
            model=model,
            num_microbatches=len(rank.parts),
            seq_length=1,
            micro_batch_size=1,
            pg_collection=groups,
        )
    weight = next(model.parameters())
    return getattr(weight, "main_grad", weight.grad).item(), ops


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("static_cp_size", [1, 2])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("road", "in_collective"), WAYS)
def test_gradient_is_the_sum_of_all_parts(road, in_collective, step, static_cp_size) -> None:
    total = sum(sum(rank.tokens) for rank in step)
    gradient = 0.0
    for rank in step:
        counts = [
            Counts(
                local_tokens=tokens,
                total_tokens=max(total, 1),
                num_microbatches=len(rank.parts),
                num_ranks=len(step),
                static_cp_size=static_cp_size,
            )
            for tokens in rank.tokens
        ]
        share, _ = _share(road, rank, counts, total=total, in_collective=in_collective)
        gradient += share

    assert gradient == pytest.approx(sum(sum(rank.parts) for rank in step), rel=1e-15, abs=1e-15)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(("road", "in_collective"), WAYS)
def test_gradients_are_reduced_once_a_step_by_the_operation_that_is_asked_for(
    road, in_collective
) -> None:
    counts = [Counts(local_tokens=1, total_tokens=4, num_microbatches=2, num_ranks=2)] * 2
    _, ops = _share(road, Rank((1, 1), (1.0, 1.0)), counts, total=4, in_collective=in_collective)

    if not (road.per_token or road.ddp_averages):
        assert ops == []  # the gradients are the user's to add up
    else:
        assert ops == [dist.ReduceOp.AVG if in_collective else dist.ReduceOp.SUM]


@pytest.mark.usefixtures("megatron")
def test_megatron_refuses_to_average_gradients_that_are_divided_by_tokens() -> None:
    groups = _groups(num_ranks=2, static_cp_size=1)
    with pytest.raises(AssertionError, match="Cannot average in collective"):
        _model(MAIN_ROAD, groups, in_collective=True)


def test_main_road_has_one_factor_for_every_rank_and_micro_batch() -> None:
    factors = {
        loss_factor(
            MAIN_ROAD,
            Counts(
                local_tokens=tokens,
                total_tokens=17,
                num_microbatches=micro_batches,
                num_ranks=ranks,
                static_cp_size=cp_size,
            ),
        )
        for tokens, micro_batches, ranks, cp_size in product((0, 5), (1, 3), (2, 4), (1, 2))
    }

    assert factors == {17}


def test_no_factor_depends_on_how_many_tokens_others_have_but_that_of_the_main_road() -> None:
    def factor(road, total):
        counts = Counts(local_tokens=3, total_tokens=total, num_microbatches=2, num_ranks=4)
        return loss_factor(road, counts)

    assert [road for road in ROADS if factor(road, 10) != factor(road, 20)] == [MAIN_ROAD]


@pytest.mark.parametrize(
    ("road", "words"),
    [
        (Road(num_values=4), "num_values=4: a loss function returns 2 or 3 values"),
        (
            Road(per_token=True, ddp_averages=True),
            "per_token=True with ddp_averages=True: gradients would be divided by ranks and by "
            "tokens, and Megatron's data parallelism refuses it; leave average_in_collective off",
        ),
    ],
    ids=["values", "averages"],
)
def test_road_that_megatron_does_not_have_is_refused(road, words) -> None:
    counts = Counts(local_tokens=1, total_tokens=1, num_microbatches=1, num_ranks=1)
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        loss_factor(road, counts)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"local_tokens": -1}, "local_tokens=-1 must be at least 0"),
        ({"total_tokens": 0}, "total_tokens=0 must be at least 1"),
        ({"num_microbatches": 0}, "num_microbatches=0 must be at least 1"),
        ({"num_ranks": 0}, "num_ranks=0 must be at least 1"),
        ({"static_cp_size": 0}, "static_cp_size=0 must be at least 1"),
        (
            {"local_tokens": 11},
            "local_tokens=11 is more than total_tokens=10; the total is that of all micro-batches "
            "and DP×CP ranks together",
        ),
    ],
)
def test_counts_that_cannot_be_are_refused(counts, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        Counts(
            **{"local_tokens": 1, "total_tokens": 10, "num_microbatches": 2, "num_ranks": 4}
            | counts
        )


def test_examples_run() -> None:
    assert doctest.testmod(impl.scale).failed == 0
