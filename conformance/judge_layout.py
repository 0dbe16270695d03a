"""The plan that was run and every pack of it, exactly: what the `layout` check compares.

Of a plan that was asked for, every micro-batch must have the groups asked for. Of a step that the
implementation planned by itself, the packs say what it planned, and that must keep to its limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .finding import Finding
from .protocol import Oracle, Outputs, Pack, Plan, Schedule, Task


def check_layout(
    task: Task, step: Plan | Schedule, outputs: Sequence[Outputs], oracle: Oracle
) -> Finding:
    """Every sample once, in groups that are asked for or may be; tokens, positions and labels.

    Args:
        outputs: of one pass, by rank.
    """
    judge = _Judge(task, [output.packs for output in outputs], oracle)
    faults = judge.scheduled(step) if isinstance(step, Schedule) else judge.planned(step)
    wrong = next(faults, "")
    return Finding("layout", float("inf") if wrong else 0.0, 0.0, wrong)


@dataclass(frozen=True)
class _Judge:
    """Packs of every rank, in the order in which it ran them."""

    task: Task
    packs: Sequence[Sequence[Pack]]
    oracle: Oracle

    @property
    def lines(self) -> tuple[tuple[int, ...], ...]:
        """For every place of a model copy, the ranks that share the samples."""
        return self.task.parallel.dp_cp_ranks(len(self.packs))

    def planned(self, plan: Plan) -> Iterator[str]:
        for rank, packs in enumerate(self.packs):
            if len(packs) < len(plan) or any(pack.samples for pack in packs[len(plan) :]):
                yield f"rank {rank} ran {len(packs)} micro-batches of {len(plan)}"
        for number, micro_batch in enumerate(plan):
            starts = list(accumulate(micro_batch.cp_sizes, initial=0))
            for line in self.lines:
                groups = [line[start:end] for start, end in pairwise(starts)]
                leaders = [self.packs[members[0]][number] for members in groups]
                held = sorted(sample for pack in leaders for sample in pack.samples)
                if held != sorted(micro_batch.samples):
                    wanted = sorted(micro_batch.samples)
                    yield f"micro-batch {number} holds samples {held}, not {wanted}"
                for members in groups:
                    yield from self._group(number, members)

    def _group(self, number: int, members: tuple[int, ...]) -> Iterator[str]:
        first = self.packs[members[0]][number]
        for rank in members:
            pack, place = self.packs[rank][number], f"micro-batch {number}, rank {rank}"
            if pack.cp_ranks != members:
                yield f"{place}: CP group is ranks {list(pack.cp_ranks)}, not {list(members)}"
            elif pack.samples != first.samples:
                yield f"{place}: samples {pack.samples}, rank {members[0]} has {first.samples}"
            else:
                yield from self._pack(pack, members.index(rank), place)

    def scheduled(self, schedule: Schedule) -> Iterator[str]:
        for line in self.lines:
            held: dict[int, tuple[int, ...]] = {}
            for rank in line:
                for number, pack in enumerate(self.packs[rank]):
                    place = f"pack {number} of rank {rank}"
                    yield from self._place(rank, line, pack, place)
                    yield from self._cap(schedule, pack, place)
                    yield from self._held(held, rank, pack, place)
            missing = sorted(set(range(len(self.task.batch.input_ids))) - set(held))
            if missing:
                yield f"samples {missing} are in no pack of ranks {list(line)}"
        if self.task.parallel.pp_size > 1:
            ran = [len(packs) for packs in self.packs]
            if len(set(ran)) > 1:
                yield f"ranks ran {ran} micro-batches, but meet in each of them"

    def _place(self, rank: int, line: tuple[int, ...], pack: Pack, place: str) -> Iterator[str]:
        if rank not in pack.cp_ranks or not set(pack.cp_ranks) <= set(line):
            yield f"{place}: CP group {list(pack.cp_ranks)} is not of ranks {list(line)} with it"
            return
        like = sum(pack.samples == own.samples for own in self.packs[rank])
        for other in pack.cp_ranks if pack.samples else ():
            found = [own for own in self.packs[other] if own.samples == pack.samples]
            if len(found) != like or any(own.cp_ranks != pack.cp_ranks for own in found):
                yield f"{place}: rank {other} of its CP group did not run samples {pack.samples}"
        yield from self._pack(pack, pack.cp_ranks.index(rank), place)

    def _held(
        self, held: dict[int, tuple[int, ...]], rank: int, pack: Pack, place: str
    ) -> Iterator[str]:
        """Note whose samples these are; a sample in two groups, or twice in one, is run twice."""
        if rank != pack.cp_ranks[0]:
            return
        for sample in pack.samples:
            if sample in held:
                yield f"{place}: sample {sample} was run by ranks {list(held[sample])} as well"
            held[sample] = pack.cp_ranks

    def _cap(self, schedule: Schedule, pack: Pack, place: str) -> Iterator[str]:
        limit, cp_size = schedule.max_seqlen_per_dp_cp_rank, len(pack.cp_ranks)
        longest = max((self.task.batch.seqlens[sample] for sample in pack.samples), default=0)
        if schedule.scheduler != "uniform" and pack.samples and len(pack.tokens) > limit:
            yield f"{place}: {len(pack.tokens)} rows are above the limit of {limit}"
        elif longest > limit * cp_size:
            yield f"{place}: {longest} tokens of a sequence on {cp_size} ranks: over {limit} each"

    def _pack(self, pack: Pack, cp_rank: int, place: str) -> Iterator[str]:
        """Rows of one pack against the oracle's."""
        padding, parallel = self.task.padding, self.task.parallel
        if not pack.samples:
            if not (pack.tokens == padding.token_id).all():
                yield f"{place}: no samples, but tokens {pack.tokens.tolist()}"
            return
        true = self.oracle.pack(
            self.task.batch,
            pack.samples,
            cp_ranks=pack.cp_ranks,
            cp_rank=cp_rank,
            padding=padding,
            tp_size=parallel.tp_size if parallel.sequence_parallel else 1,
        )
        for name in ("cu_seqlens_padded", "position_ids", "tokens", "labels"):
            mine, expected = getattr(pack, name).tolist(), getattr(true, name).tolist()
            if mine != expected:
                pairs = enumerate(zip(mine, expected, strict=False))
                at = next((row for row, (got, want) in pairs if got != want), -1)
                yield f"{place}: {name} {mine} should be {expected}, first wrong at row {at}"
