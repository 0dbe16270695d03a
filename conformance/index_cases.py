"""Cases of index logic (batches × sizes, refusals, what was worked by hand) and their verdicts.

Ids read like those of the suite: `index-ragged-cp2-tp1`, `index-ragged-4ranks`,
`index-refused-4ranks`, `index-fixture_one_token-cp2`.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch

from .fixture_files import LayoutFile, PlanFile, layout_files, plan_files
from .index_checks import (
    Check,
    Packing,
    Wrong,
    check_boundaries,
    check_labels,
    check_layout,
    check_merge,
    check_positions,
    check_schedule,
    check_split,
    check_unpack,
    cp_sizes,
    expect_refusal,
    expect_samples,
)
from .lengths import COLUMNS, case_lengths
from .protocol import IndexImplementation as Index
from .protocol import Unsupported
from .verdict import CheckResult, Verdict

CP_SIZES = (1, 2, 3, 4, 6, 8)
TP_SIZES = (1, 2, 3)
WORLDS = (1, 2, 3, 4, 6, 8, 12)
FIXTURES = "fixtures"
_PADDINGS = [column for column in COLUMNS if column not in ("poisoned", "text", "refused")]


@dataclass(frozen=True, kw_only=True)
class IndexCase:
    """What one line of the report says, check by check.

    Args:
        padding: column of the matrix. cp: CP sizes that take part.
        checks: by name of what is compared.
    """

    id: str
    padding: str
    lengths: tuple[int, ...]
    world: int
    cp: tuple[int, ...]
    checks: Mapping[str, Check]


def index_cases() -> list[IndexCase]:
    """Every case, those of one padding together."""
    cases: list[IndexCase] = []
    for padding in _PADDINGS:
        cases += [packing_case(padding, *sizes) for sizes in product(CP_SIZES, TP_SIZES)]
        cases += [plan_case(padding, world) for world in WORLDS if world > 1 or padding != "few"]
    cases += [refusal_case(world) for world in (1, 4, 6)]
    return [*cases, *map(layout_file_case, layout_files()), *map(plan_file_case, plan_files())]


def packing_case(
    padding: str, cp_size: int, tp_size: int, *, seqlens: tuple[int, ...] = ()
) -> IndexCase:
    """One batch on the ranks of one CP group; its lengths follow from `padding` if not given."""
    seqlens = seqlens or case_lengths(padding, world=2 * cp_size, cp_sizes=[cp_size])
    packing = Packing(seqlens, cp_size, tp_size)
    return IndexCase(
        id=f"index-{padding}-cp{cp_size}-tp{tp_size}",
        padding=padding,
        lengths=seqlens,
        world=cp_size,
        cp=(cp_size,),
        checks=_packing_checks(packing),
    )


def plan_case(padding: str, world: int, *, seqlens: tuple[int, ...] = ()) -> IndexCase:
    """One batch spread over a world, at every CP size that the world has."""
    seqlens = seqlens or case_lengths(padding, world=world, cp_sizes=[1])
    return IndexCase(
        id=f"index-{padding}-{world}ranks",
        padding=padding,
        lengths=seqlens,
        world=world,
        cp=cp_sizes(world),
        checks={
            "schedule": partial(check_schedule, seqlens, world),
            "split": partial(check_split, seqlens, world),
            "merge": partial(check_merge, seqlens, world),
        },
    )


def refusal_case(world: int) -> IndexCase:
    """What must be refused in words: an empty batch, an empty sequence, too long, no such size."""
    return IndexCase(
        id=f"index-refused-{world}ranks",
        padding="refused",
        lengths=(),
        world=world,
        cp=(),
        checks={
            "layout": _refuses_to_pack,
            "schedule": partial(_refuses_to_schedule, world),
            "split": partial(_refuses_to_split, world),
        },
    )


def layout_file_case(file: LayoutFile) -> IndexCase:
    """A layout worked by hand; the oracle is not asked."""
    packing = Packing(file.lengths, file.cp_size, file.tp_size)
    return IndexCase(
        id=f"index-fixture_{file.name}",
        padding=FIXTURES,
        lengths=file.lengths,
        world=file.cp_size,
        cp=(file.cp_size,),
        checks={
            name: partial(_meets_layout, file, check)
            for name, check in _packing_checks(packing).items()
        },
    )


def plan_file_case(file: PlanFile) -> IndexCase:
    """A plan worked by hand; the oracle is not asked."""
    checks: dict[str, Check] = {"schedule": partial(_meets_schedule, file)}
    if not file.error:
        checks["split"] = partial(_meets_split, file)
    return IndexCase(
        id=f"index-fixture_{file.name}",
        padding=FIXTURES,
        lengths=file.lengths,
        world=file.world_size,
        cp=(file.local_cp_size,) if file.local_cp_size else (),
        checks=checks,
    )


def _packing_checks(packing: Packing) -> dict[str, Check]:
    return {
        "layout": partial(check_layout, packing),
        "positions": partial(check_positions, packing),
        "boundaries": partial(check_boundaries, packing),
        "unpack": partial(check_unpack, packing),
        "labels": partial(check_labels, packing),
    }


def verify(case: IndexCase, index: object, oracle: Index, *, rerun: str) -> list[CheckResult]:
    """One result a check; whatever the implementation raises is a verdict.

    Args:
        index: what the module under test offers under this name; None if nothing.
        rerun: what stands before a case id in the command that repeats it.
    """
    offered = cast(Index, _Offered(index))
    return [
        CheckResult(
            id=case.id,
            check=name,
            lengths=case.lengths,
            world=case.world,
            cp=case.cp,
            padding=case.padding,
            rerun=f"{rerun} {case.id}",
            **_outcome(check, offered, oracle),
        )
        for name, check in case.checks.items()
    ]


def _outcome(check: Check, index: Index, oracle: Index) -> dict[str, Any]:
    try:
        check(index, oracle)
    except (Unsupported, NotImplementedError) as error:
        return {"verdict": Verdict.UNSUPPORTED, "reason": str(error) or "not implemented"}
    except Wrong as wrong:
        return {"verdict": Verdict.FAIL, "where": wrong.where, "reason": wrong.reason}
    except Exception as error:  # noqa: BLE001 a verdict too, by the name of its type
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
        reason = f"raised {type(error).__name__}: {error}"
        return {"verdict": Verdict.FAIL, "where": where, "reason": reason}
    return {"verdict": Verdict.PASS}


class _Offered:
    """An implementation that says of a method it lacks that it does not support it."""

    def __init__(self, index: object) -> None:
        self._index = index

    def __getattr__(self, name: str) -> Any:
        if self._index is None:
            raise Unsupported("the module offers no `index`")
        if not hasattr(self._index, name):
            raise Unsupported(f"its `index` has no method {name}")
        return getattr(self._index, name)


def _refuses_to_pack(index: Index, oracle: Index) -> None:
    sizes = {"cp_size": 2, "cp_rank": 0, "tp_size": 1, "pad_value": 0}
    empty = torch.arange(0)
    expect_refusal(partial(index.pack, [], **sizes), "no sequence to pack")
    sequences = [torch.arange(5), empty, torch.arange(3)]
    expect_refusal(partial(index.pack, sequences, **sizes), "sequence 1 has no token")


def _refuses_to_schedule(world: int, index: Index, oracle: Index) -> None:
    for seqlens, limit, mentions in (
        ((), 8, ""),
        ((5, 0, 3), 8, ""),
        ((3, 8 * world + 1), 8, str(8 * world + 1)),
        ((3, 5), 0, ""),
    ):
        choose = partial(
            index.choose_local_cp_size, seqlens, world_size=world, max_seqlen_per_dp_cp_rank=limit
        )
        where = f"lengths {list(seqlens)}, max_seqlen_per_dp_cp_rank={limit}"
        expect_refusal(choose, where, mentions=mentions)


def _refuses_to_split(world: int, index: Index, oracle: Index) -> None:
    no_divisors = [size for size in range(world + 3) if size == 0 or world % size]
    asked = [((5, 9, 3), size) for size in no_divisors] + [((), world), ((5, 0, 3), world)]
    for seqlens, cp_size in asked:
        split = partial(index.split, seqlens, world_size=world, cp_size=cp_size)
        expect_refusal(split, f"lengths {list(seqlens)}, cp_size={cp_size}, world_size={world}")


def _meets_layout(file: LayoutFile, check: Check, index: Index, oracle: Index) -> None:
    check(index, cast(Index, file))


def _meets_schedule(file: PlanFile, index: Index, oracle: Index) -> None:
    choose = partial(
        index.choose_local_cp_size,
        file.lengths,
        world_size=file.world_size,
        max_seqlen_per_dp_cp_rank=file.max_seqlen_per_dp_cp_rank,
    )
    if file.error:
        expect_refusal(choose, file.name, mentions=file.error)
    elif (got := choose()) != file.local_cp_size:
        raise Wrong(file.name, f"CP size: expected {file.local_cp_size}, got {got}")


def _meets_split(file: PlanFile, index: Index, oracle: Index) -> None:
    got = index.split(file.lengths, world_size=file.world_size, cp_size=file.local_cp_size)
    expect_samples(got, file.samples, file.local_cp_size)
