"""What a loss is multiplied by so that Megatron's gradients are those of the unsharded batch.

Megatron divides and multiplies losses and gradients in three places, and which of them act depends
on how the loss function returns and on one setting. For years code around it moved factors of the
CP size back and forth (Megatron-LM #673, #906, #1676, #7513; slime #987; SkyRL #1420, #1751;
verl #5869). Here every factor is in one table, and none of them depends on the CP size of a
micro-batch. docs/gradient_scale.md says where in Megatron each entry is from.

The loss of a batch is a sum over its tokens of weight times value, with weights that `impl.loss`
makes of the whole batch, so every aggregation and a user's own weights are one case. A rank
differentiates, through its own tokens only, the sum over the sequences of its CP group
(`impl.thd.postprocess_thd_engine`). Summed over ranks and micro-batches, those gradients are
exact; what Megatron does to them on the way is undone by a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Road:
    """How a loss reaches Megatron.

    Args:
        num_values: 3 if the loss function returns `(loss, num_tokens, report)`, 2 if it returns
            `(loss, report)`.
        per_token: `calculate_per_token_loss`.
        ddp_averages: whether gradients are averaged over the DP×CP ranks, not added up. Megatron's
            data parallelism does so unless `per_token`; `average_in_collective` only says where.
            Without `per_token`, False means that the model is not in Megatron's
            `DistributedDataParallel`: it runs bare through the schedule, and the user adds up
            `param.grad` over the DP×CP ranks (`all_reduce` with SUM, as a wrapper of one's own
            does). An `all_reduce` with AVG makes it True. With `per_token`, False is the only
            value, and `finalize_model_grads` must run: it is what divides by the tokens.
    """

    num_values: int = 3
    per_token: bool = True
    ddp_averages: bool = False


MAIN_ROAD = Road()


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What Megatron divides and multiplies by.

    Args:
        local_tokens: `num_tokens` that this rank returns for this micro-batch. total_tokens: the
            sum of them over micro-batches and DP×CP ranks, but at least 1.
        num_microbatches: of this rank; ranks may differ. num_ranks: DP×CP.
        static_cp_size: the CP size that Megatron was initialised with.
    Raises:
        ValueError: a count below what is possible, by name.
    """

    local_tokens: int
    total_tokens: int
    num_microbatches: int
    num_ranks: int
    static_cp_size: int = 1

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {lowest}")
        if self.local_tokens > self.total_tokens:
            raise ValueError(
                f"local_tokens={self.local_tokens} is more than total_tokens={self.total_tokens}; "
                "the total is that of all micro-batches and DP×CP ranks together"
            )


_LOWEST = {
    "local_tokens": 0,
    "total_tokens": 1,
    "num_microbatches": 1,
    "num_ranks": 1,
    "static_cp_size": 1,
}


_FACTORS: dict[Road, Callable[[Counts], float]] = {
    # finalize_model_grads divides by the sum of `num_tokens`
    Road(num_values=3, per_token=True, ddp_averages=False): lambda c: c.total_tokens,
    # no sum of `num_tokens`, so nothing is divided by it; the schedule multiplies by the static CP
    # size and divides by the number of micro-batches
    Road(num_values=2, per_token=True, ddp_averages=False): lambda c: (
        c.num_microbatches / c.static_cp_size
    ),
    # the schedule divides by `num_tokens` and the number of micro-batches
    Road(num_values=3, per_token=False, ddp_averages=False): lambda c: (
        max(c.local_tokens, 1) * c.num_microbatches
    ),
    Road(num_values=2, per_token=False, ddp_averages=False): lambda c: (
        c.num_microbatches / c.static_cp_size
    ),
    # and data parallelism by the number of ranks
    Road(num_values=3, per_token=False, ddp_averages=True): lambda c: (
        max(c.local_tokens, 1) * c.num_microbatches * c.num_ranks
    ),
    Road(num_values=2, per_token=False, ddp_averages=True): lambda c: (
        c.num_microbatches * c.num_ranks / c.static_cp_size
    ),
}


def loss_factor(road: Road, counts: Counts) -> float:
    """The factor of a rank's part of the loss of the batch in one micro-batch.

    On the main road, three values with `calculate_per_token_loss`, it is the number of tokens of
    the batch, the same everywhere.

    Raises:
        ValueError: a road that Megatron does not have.

    >>> counts = Counts(local_tokens=3, total_tokens=10, num_microbatches=2, num_ranks=4)
    >>> loss_factor(MAIN_ROAD, counts)
    10
    >>> loss_factor(Road(num_values=2, per_token=False, ddp_averages=True), counts)
    8.0
    """
    if road.num_values not in (2, 3):
        raise ValueError(f"num_values={road.num_values}: a loss function returns 2 or 3 values")
    if road.per_token and road.ddp_averages:
        raise ValueError(
            "per_token=True with ddp_averages=True: gradients would be divided by ranks and by "
            "tokens, and Megatron's data parallelism refuses it; leave average_in_collective off"
        )
    return _FACTORS[road](counts)
