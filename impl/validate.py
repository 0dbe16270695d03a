"""Whether a plan can be run, before any collective: what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from .config import DynamicCPConfig
from .layout import padded_lengths
from .plan import GroupPlan, Plan, cp_blocks
from .schedule import check_seqlens

LOOSE_SCHEDULERS = ("uniform", "megatron")
"""Plans by rules of others', in which a group can be without samples though it need not be."""


def validate(plan: Plan, *, config: DynamicCPConfig, tp_size: int = 1) -> None:
    """Check that a plan keeps its promises and the settings.

    Every sample runs exactly once. Groups are blocks of `cp_blocks` within the bounds on the CP
    size, and share no rank inside a micro-batch, so no order of arrival can deadlock. Packs keep
    to what the settings ask of them and, padding included, to the cap; for "uniform" the cap is on
    one sequence before padding. If the plan is barriered, every micro-batch covers all ranks and
    each group has a sample, unless no sample of the micro-batch could be given to it.

    Raises:
        ValueError: the first thing that is wrong.
    """
    check_runnable(plan)
    check_settings(plan, config=config, tp_size=tp_size)
    if plan.scheduler not in LOOSE_SCHEDULERS:
        _check_idle(plan, config, tp_size)


def check_runnable(plan: Plan) -> None:
    """Check what every plan must keep to, whoever made it: samples, groups and barriers.

    Raises:
        ValueError: the first thing that is wrong.
    """
    check_seqlens(plan.seqlens)
    _check_samples(plan)
    _check_groups(plan)


def check_settings(plan: Plan, *, config: DynamicCPConfig, tp_size: int = 1) -> None:
    """Check the CP size and the pack of every group against the settings.

    Raises:
        ValueError: the first that does not keep to them.
    """
    _check_cp_sizes(plan, config)
    for place, _, group in _places(plan):
        try:
            _check_pack(plan, group.samples, group.cp_size, config, tp_size)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error


def _places(plan: Plan) -> list[tuple[str, int, GroupPlan]]:
    """Every group with its micro-batch, and words to find it by."""
    return [
        (f"micro-batch {index}, {_ranks(group.ranks)}", index, group)
        for index, micro_batch in enumerate(plan.micro_batches)
        for group in micro_batch.groups
    ]


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no ranks"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}..{ranks[-1]}"


def _check_samples(plan: Plan) -> None:
    found: dict[int, str] = {}
    for place, _, group in _places(plan):
        for sample in group.samples:
            if not 0 <= sample < len(plan.seqlens):
                raise ValueError(
                    f"{place}: there is no sample {sample}, the batch has {len(plan.seqlens)}"
                )
            if sample in found:
                raise ValueError(
                    f"sample {sample} is run twice, by {found[sample]} and by {place}; take it "
                    "from one of them"
                )
            found[sample] = place
    for sample in range(len(plan.seqlens)):
        if sample not in found:
            raise ValueError(f"sample {sample} is in no micro-batch; add it to a group")


def _check_groups(plan: Plan) -> None:
    blocks = {tuple(block) for block in cp_blocks(plan.world_size)}
    taken: dict[tuple[int, int], str] = {}
    for place, index, group in _places(plan):
        if group.ranks not in blocks:
            raise ValueError(
                f"{place}: {list(group.ranks)} is no CP group of {plan.world_size} ranks; groups "
                "are the whole world, and n ranks from a multiple of n for powers of two n"
            )
        for rank in group.ranks:
            if (index, rank) in taken:
                raise ValueError(
                    f"rank {rank} is in two groups of a micro-batch: {taken[index, rank]} and "
                    f"{place}; move one to a micro-batch of its own"
                )
            taken[index, rank] = place
    if plan.barriered:
        _check_covered(plan, set(taken))


def _check_covered(plan: Plan, taken: set[tuple[int, int]]) -> None:
    for index in range(len(plan.micro_batches)):
        for rank in range(plan.world_size):
            if (index, rank) not in taken:
                raise ValueError(
                    f"rank {rank} has no group in micro-batch {index} and would never come to its "
                    "barrier; widen a group to it, or plan without barriers"
                )


def _check_cp_sizes(plan: Plan, config: DynamicCPConfig) -> None:
    for index, micro_batch in enumerate(plan.micro_batches):
        sizes = sorted({group.cp_size for group in micro_batch.groups})
        if plan.scheduler == "uniform" and len(sizes) > 1:
            raise ValueError(
                f"micro-batch {index} has CP sizes {', '.join(map(str, sizes))}, and a uniform "
                "plan one for all its groups; cut all alike, or use scheduler='balanced'"
            )
    lowest, highest = config.min_cp_size, config.highest_cp_size or plan.world_size
    for place, _, group in _places(plan):
        if not lowest <= group.cp_size <= highest:
            raise ValueError(
                f"{place}: CP size {group.cp_size} is not from min_cp_size={lowest} to "
                f"max_cp_size={highest}; change the bounds or the group"
            )


def _check_pack(
    plan: Plan, samples: Sequence[int], cp_size: int, config: DynamicCPConfig, tp_size: int
) -> None:
    """Some samples as the pack of a group."""
    rules, limit = config.rules, config.max_seqlen_per_dp_cp_rank
    rules.check_sequences(len(samples))
    lengths = [plan.seqlens[sample] for sample in samples]
    padded = padded_lengths(lengths, cp_size=cp_size, tp_size=tp_size, rules=rules)
    rows = sum(padded) // cp_size
    if plan.scheduler == "uniform":
        _check_each(plan, samples, cp_size, limit)
    elif rows > limit:
        raise ValueError(
            f"samples {list(samples)} are {rows} tokens a rank, padding included, above "
            f"max_seqlen_per_dp_cp_rank={limit}; move some to another group, widen this one or "
            "raise the limit"
        )


def _check_each(plan: Plan, samples: Sequence[int], cp_size: int, limit: int) -> None:
    for sample in samples:
        if plan.seqlens[sample] > cp_size * limit:
            raise ValueError(
                f"sample {sample} has {plan.seqlens[sample]} tokens, above "
                f"max_seqlen_per_dp_cp_rank={limit} for each of {cp_size} ranks; widen the group "
                "or raise the limit"
            )


def _check_idle(plan: Plan, config: DynamicCPConfig, tp_size: int) -> None:
    for place, index, group in _places(plan):
        if group.samples:
            continue
        if not plan.barriered:
            raise ValueError(f"{place}: no sample to run; leave the group out")
        better = _better(plan, index, group, config, tp_size)
        if better:
            raise ValueError(f"{place}: no sample to run, though {better}")


def _better(
    plan: Plan, index: int, idle: GroupPlan, config: DynamicCPConfig, tp_size: int
) -> str | None:
    """What would give the ranks of a group without samples something to do."""

    def fit(samples: Sequence[int], cp_size: int) -> bool:
        try:
            _check_pack(plan, samples, cp_size, config, tp_size)
        except ValueError:
            return False
        return True

    busy = [group for group in plan.micro_batches[index].groups if group.samples]
    if not busy:
        return "no other group of the micro-batch has one; leave the micro-batch out"
    for group in busy:
        shortest = min(group.samples, key=lambda sample: plan.seqlens[sample])
        if len(group.samples) > 1 and fit([shortest], idle.cp_size):
            return f"{_ranks(group.ranks)} could leave it sample {shortest}"
    highest = config.highest_cp_size or plan.world_size
    for block in cp_blocks(plan.world_size):
        inside = [group for group in busy if set(group.ranks) & set(block)]
        if len(block) <= highest and set(idle.ranks) <= set(block) and len(inside) == 1:
            (group,) = inside
            if set(group.ranks) <= set(block) and fit(group.samples, len(block)):
                return f"{_ranks(group.ranks)} could be widened to {_ranks(block)}"
    alone = [[sample] for group in busy for sample in group.samples]
    if highest >= plan.world_size and all(fit(one, plan.world_size) for one in alone):
        return "each sample of the micro-batch fits the whole world"
    return None
