"""Every cell of the table of factors, against what Megatron does to a loss, step by step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

import pytest

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


EVEN = [Rank((4, 4), (1.0, 2.0)), Rank((4, 4), (3.0, 4.0))]
UNEVEN = [Rank((1, 9, 5), (1.0, -2.0, 0.5)), Rank((7,), (3.0,)), Rank((2, 2), (8.0, 0.0))]
NO_TOKEN = [Rank((0, 5), (0.0, 2.0)), Rank((0, 0), (0.0, 0.0))]
NOTHING = [Rank((0,), (0.0,)), Rank((0,), (0.0,))]
STEPS = {"even": EVEN, "uneven": UNEVEN, "no_token": NO_TOKEN, "nothing": NOTHING}


def _schedule(road: Road, loss: float, tokens: int, num_microbatches: int, cp: int) -> float:
    """`forward_step_calc_loss` of megatron-core 0.15.3 to 0.19.2."""
    if road.num_values == 3:
        return loss if road.per_token else loss / max(tokens, 1) / num_microbatches
    return loss * cp / num_microbatches


def _gradient(road: Road, step: list[Rank], *, static_cp_size: int) -> float:
    """Gradient of a parameter that each loss is multiplied by, after all of Megatron."""
    total = sum(sum(rank.tokens) for rank in step)
    reduced = 0.0
    for rank in step:
        for tokens, part in zip(rank.tokens, rank.parts, strict=True):
            counts = Counts(
                local_tokens=tokens,
                total_tokens=max(total, 1),
                num_microbatches=len(rank.parts),
                num_ranks=len(step),
                static_cp_size=static_cp_size,
            )
            loss = part * loss_factor(road, counts)
            reduced += _schedule(road, loss, tokens, len(rank.parts), static_cp_size)
    if road.ddp_averages:
        reduced /= len(step)
    counted = total if road.num_values == 3 else 0  # two values count nothing
    return reduced / max(counted, 1) if road.per_token else reduced  # finalize_model_grads


@pytest.mark.parametrize("static_cp_size", [1, 2])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("road", ROADS, ids=str)
def test_gradient_is_the_sum_of_all_parts(road, step, static_cp_size) -> None:
    expected = sum(sum(rank.parts) for rank in step)

    assert _gradient(road, step, static_cp_size=static_cp_size) == pytest.approx(expected)


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
