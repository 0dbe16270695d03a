"""The plan that was run and every pack of it, exactly: what the `layout` check compares.

Of a plan that was asked for, every micro-batch must have the groups asked for. Of a step that the
implementation planned by itself, the packs say what it planned, and that must keep to its limit
and be what its scheduler promises. Ranks that share a place among the samples, those of tensor
parallelism and of pipeline stages, must have run the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .finding import Finding
from .protocol import MicroBatch, Oracle, Outputs, Pack, Plan, Schedule, Task


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
                idle = [
                    r for members in groups for r in members if not self.packs[r][number].samples
                ]
                if idle and len(held) >= len(groups):
                    yield (
                        f"micro-batch {number}: ranks {idle} have no sample, though there are "
                        f"{len(held)} for {len(groups)} groups"
                    )
        yield from self._alike()

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
        if schedule.scheduler == "uniform":
            yield from self._uniform(schedule)
            return
        for line in self.lines:
            held: dict[int, tuple[int, ...]] = {}
            for rank in line:
                for number, pack in enumerate(self.packs[rank]):
                    place = f"pack {number} of rank {rank}"
                    yield from self._place(rank, line, pack, place)
                    if pack.samples and len(pack.tokens) > schedule.max_seqlen_per_dp_cp_rank:
                        limit = schedule.max_seqlen_per_dp_cp_rank
                        yield f"{place}: {len(pack.tokens)} rows are above the limit of {limit}"
                    yield from self._held(held, rank, pack, place)
            missing = sorted(set(range(len(self.task.batch.input_ids))) - set(held))
            if missing:
                yield f"samples {missing} are in no pack of ranks {list(line)}"
            idle = [rank for rank in line if not any(pack.samples for pack in self.packs[rank])]
            if idle and schedule.scheduler == "balanced":
                yield f"ranks {idle} have no sample in any pack"
        if self.task.parallel.pp_size > 1:
            ran = [len(packs) for packs in self.packs]
            if len(set(ran)) > 1:
                yield f"ranks ran {ran} micro-batches, but meet in each of them"
        yield from self._alike()

    def _uniform(self, schedule: Schedule) -> Iterator[str]:
        """The one plan that may be run, whoever planned it."""
        samples, world_size = range(len(self.task.batch.seqlens)), len(self.lines[0])
        try:
            cp_size = self.oracle.index.choose_local_cp_size(
                self.task.batch.seqlens,
                world_size=world_size,
                max_seqlen_per_dp_cp_rank=schedule.max_seqlen_per_dp_cp_rank,
            )
        except ValueError as error:
            yield f"there is no such plan, and yet one was run: {error}"
            return
        for rank, packs in enumerate(self.packs):
            for number, pack in enumerate(packs):
                if pack.samples and len(pack.cp_ranks) != cp_size:
                    place = f"pack {number} of rank {rank}"
                    yield f"{place}: CP group {list(pack.cp_ranks)}, but the CP size is {cp_size}"
        sizes = (cp_size,) * (world_size // cp_size)
        yield from self.planned((MicroBatch(tuple(samples), sizes),))

    def _alike(self) -> Iterator[str]:
        """Ranks in the same place of two lines run the same samples in the same groups."""
        for line in self.lines[1:]:
            for first, rank in zip(self.lines[0], line, strict=True):
                if self._ran(rank, line) != self._ran(first, self.lines[0]):
                    yield f"rank {rank} did not run the plan of rank {first}, which has its place"

    def _ran(self, rank: int, line: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
        """Samples of every pack up to the last that has any, and the places that hold them."""
        packs = self.packs[rank]
        end = max((number for number, pack in enumerate(packs, 1) if pack.samples), default=0)
        return [(pack.samples, tuple(map(line.index, pack.cp_ranks))) for pack in packs[:end]]

    def _place(self, rank: int, line: tuple[int, ...], pack: Pack, place: str) -> Iterator[str]:
        if rank not in pack.cp_ranks or not set(pack.cp_ranks) <= set(line):
            yield f"{place}: CP group {list(pack.cp_ranks)} is not of ranks {list(line)} with it"
            return
        unknown = sorted(set(pack.samples) - set(range(len(self.task.batch.input_ids))))
        if unknown:
            yield f"{place}: samples {unknown} are not of the batch"
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
