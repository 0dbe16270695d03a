"""Which cases a profile runs.

`quick` walks every padding case and every CP size once; `default` crosses them with worlds, and
adds masks, temperatures, losses, models and orders; `deep` crosses the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from .case import LOSSES, MASKS, MODELS, TEMPERATURES, Case
from .lengths import COLUMNS, POISONS, REFUSALS

PROFILES = ("quick", "default", "deep")
CP_SIZES = {1: (1,), 2: (1, 2), 3: (1, 3), 4: (1, 2, 4), 6: (1, 2, 6), 8: (1, 2, 4, 8)}
_STEPS = {2: "2+1", 3: "3+1", 4: "4+2+1", 6: "6+2+1", 8: "8+4+2+1"}  # one step, every size
_ORDERS = {2: "2.1.2", 3: "3.1.3", 4: "2.4.2", 6: "2.6.2", 8: "4.1.4"}  # A, B, A
_PLAIN = [column for column in COLUMNS if column not in ("poisoned", "few", "text", "refused")]


def profile_cases(profile: str, *, num_texts: int = 0) -> tuple[Case, ...]:
    """The cases of a profile, those of one world together.

    Args:
        num_texts: batches of real documents there are.
    Raises:
        ValueError: no such profile.
    """
    if profile not in PROFILES:
        raise ValueError(f"no profile {profile!r}; there are {', '.join(PROFILES)}")
    cases = {"quick": _quick, "default": _default, "deep": _deep}[profile](num_texts)
    return tuple(sorted(dict.fromkeys(cases), key=lambda case: case.world))


def text_cases(num_texts: int, *, profile: str) -> tuple[Case, ...]:
    """The cases of a user's own documents: every batch on four ranks, at every CP size."""
    sizes = (2,) if profile == "quick" else CP_SIZES[4]
    return tuple(Case(f"text{n}", 4, ((size,),)) for n in range(num_texts) for size in sizes)


def _quick(num_texts: int) -> Iterator[Case]:
    for world, cp_size in ((1, 1), (4, 1), (4, 2), (4, 4), (3, 3), (6, 6), (8, 8)):
        for padding in _PLAIN:
            if padding in ("ragged", "short", "unpadded") or world == 4:
                yield Case(padding, world, ((cp_size,),))
    for cp_size in (1, 2, 4):
        yield Case("few", 4, ((cp_size,),))
        yield from (Case(f"poisoned_{poison}", 4, ((cp_size,),)) for poison in POISONS)
    yield from (_with_plan("ragged", 4, plan) for plan in (_STEPS[4], _ORDERS[4]))
    for mask in MASKS[1:]:
        yield Case("ragged", 4, ((2,),), mask=mask)
    yield Case("ragged", 4, ((2,),), temperature="teach", loss="entropy")
    yield Case("ragged", 4, ((4,),), temperature="t0.7", loss="seqmean")
    yield Case("ragged", 4, ((4,),), temperature="t2")
    yield from (Case("ragged", 4, ((2,),), model=model) for model in MODELS[1:])
    yield from (Case("text0", 4, ((size,),)) for size in (1, 2, 4) if num_texts)
    yield from _refusals()


def _default(num_texts: int) -> Iterator[Case]:
    yield from _quick(num_texts)
    for world, sizes in CP_SIZES.items():
        for size in sizes:
            yield from (Case(padding, world, ((size,),)) for padding in _PLAIN)
            if world > 1:
                yield Case("few", world, ((size,),))
            if world in (3, 4, 6, 8):
                yield from (Case(f"poisoned_{poison}", world, ((size,),)) for poison in POISONS)
            if world in (4, 8):
                yield from (
                    Case(padding, world, ((size,),), mask=mask)
                    for padding in ("ragged", "longtail")
                    for mask in MASKS
                )
                yield Case("few_one", world, ((size,),))
            if world == 4:
                yield from (Case("ragged", world, ((size,),), model=model) for model in MODELS)
                yield from (
                    Case("uneven", world, ((size,),), temperature=temperature, loss=loss)
                    for temperature, loss in zip(TEMPERATURES, (*LOSSES, "entropy"), strict=True)
                )
    for padding in ("ragged", "short", "longtail"):
        yield from (_with_plan(padding, world, plan) for world, plan in _STEPS.items())
        yield from (_with_plan(padding, world, plan) for world, plan in _ORDERS.items())
    yield from (
        Case(f"text{n}", 4, ((size,),)) for n in range(min(num_texts, 3)) for size in (1, 2, 4)
    )
    yield from (Case("text0", 8, ((size,),)) for size in (2, 8) if num_texts)


def _deep(num_texts: int) -> Iterator[Case]:
    yield from _default(num_texts)
    for world, sizes in CP_SIZES.items():
        for size in sizes:
            for padding in _PLAIN:
                for mask in MASKS:
                    yield Case(padding, world, ((size,),), mask=mask)
                yield from (Case(padding, world, ((size,),), model=model) for model in MODELS)
                yield from (
                    Case(padding, world, ((size,),), temperature=temperature, loss=loss)
                    for temperature in TEMPERATURES
                    for loss in LOSSES
                )
    yield from text_cases(num_texts, profile="deep")


def _refusals() -> Iterator[Case]:
    for refusal in REFUSALS:
        if refusal != "size":
            yield from (Case(f"refused_{refusal}", 4, ((size,),)) for size in (1, 2, 4))
    yield from (
        Case("refused_size", world, ((size,),)) for world, size in ((4, 3), (6, 4), (6, 3), (8, 6))
    )


def _with_plan(padding: str, world: int, plan: str) -> Case:
    cp = tuple(tuple(map(int, part.split("+"))) for part in plan.split("."))
    return Case(padding, world, cp)
