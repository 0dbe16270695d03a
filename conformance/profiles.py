"""Which cases a profile runs.

`quick` fills every cell of the matrix, padding case by CP size; `default` crosses them with
worlds, and adds masks, temperatures, losses, models and orders; `deep` crosses the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from .case import LOSSES, MASKS, SCHEDULERS, TEMPERATURES, Case, parse_case
from .lengths import COLUMNS, POISONS, REFUSALS

_PLAIN_MODELS = ("llama", "qwen2", "qwen3", "starcoder2", "gptj", "mqa")
PROFILES = ("quick", "default", "deep")
CP_SIZES = {1: (1,), 2: (1, 2), 3: (1, 3), 4: (1, 2, 4), 6: (1, 2, 6), 8: (1, 2, 4, 8)}
_STEPS = {2: "2+1", 3: "3+1", 4: "4+2+1", 6: "6+2+1", 8: "8+4+2+1"}  # one step, every size
_ORDERS = {2: "2.1.2", 3: "3.1.3", 4: "2.4.2", 6: "2.6.2", 8: "4.1.4"}  # A, B, A
_EVERY_SIZE = ((4, "1"), (4, "2"), (3, "3"), (4, "4"), (6, "6"), (8, "8"), (4, "4+2+1"))
_MIXED = (  # groups of mixed sizes in one micro-batch
    "4ranks-cp4+2_1_1",
    "6ranks-cp6+4_2",
    "8ranks-cp4_2_1_1+8",
    "5ranks-cp4_1+2_2_1+5",
    "7ranks-cp4_2_1+7",
)
_PLANNED = (  # steps that the implementation plans by itself
    "lens16_16_16_32_224-4ranks-cp4+2_1_1",
    "lens16_16_16_32_224-4ranks-cpbalanced56",
    "ragged-4ranks-cpbalanced24",
    "ragged-8ranks-cpuniform24",
    "longtail-8ranks-cpmegatron32",
    "ragged-4ranks-cpuniform24.balanced24.uniform24",
    "longtail-6ranks-cpbalanced40",
    "few_one-3ranks-cpbalanced24",
)
_CUTS = (
    "ragged-4ranks-cp2.2+2.2+2+2+2+2",
    "ragged-4ranks-cp2.2+2.2+2+2+2+2-seqmean",
    "ragged-4ranks-cp2.2+2.2+2+2+2+2-seqsum",
)
_INTERRUPTED = (  # passes that fail inside a layer before they are run
    "ragged-4ranks-cp2.1.2-interrupted",
    "ragged-4ranks-cp4+2_1_1.1.4+2_1_1-interrupted",
)
_MORE_INTERRUPTED = (
    "ragged-4ranks-cp2.2-interrupted",
    "ragged-8ranks-cp8.1.8-interrupted",
    "ragged-4ranks-cpbalanced24.balanced24-interrupted",
    "ragged-4ranks-cp2.1.2-tp2-sp-interrupted",
    "ragged-4ranks-cp2.1.2-static2-interrupted",
    "ragged-4ranks-cp2.1.2-distopt-interrupted",
    "ragged-4ranks-cp2.1.2-recompute-interrupted",
)
_LAYOUTS = (  # one or two cases of every parallel dimension
    "ragged-4ranks-cp2-tp2",
    "ragged-4ranks-cp2+1-tp2-sp",
    "ragged-3ranks-cp1-tp3-sp",
    "ragged-4ranks-cp2+1-pp2",
    "ragged-4ranks-cp2+1-pp2-vpp2",
    "ragged-8ranks-cp2+1-tp2-sp-pp2",
    "ragged-4ranks-cp1.4.2-static2",
    "ragged-4ranks-cp4+2_1_1-distopt",
    "ragged-4ranks-cp4+2_1_1-recompute",
)
_MORE_LAYOUTS = (
    "ragged-3ranks-cp1-tp3",
    "ragged-6ranks-cp2-tp3-sp",
    "ragged-4ranks-cp1-tp4",
    "ragged-8ranks-cp2+1-tp4-sp",
    "ragged-8ranks-cp4+2_1_1-tp2-sp",
    "ragged-8ranks-cp4+2_1_1-pp2",
    "ragged-8ranks-cpbalanced24-pp2",
    "ragged-8ranks-cp2+1-pp4",
    "ragged-8ranks-cp2+1-pp4-vpp2",
    "ragged-8ranks-cp2+1-tp2-pp2-vpp2",
    "ragged-8ranks-cp2.1.2-tp2-sp-pp2-vpp2-static2-recompute-distopt",
    "ragged-4ranks-cp1.2.4-static4",
    "ragged-4ranks-cpbalanced24-distopt",
)
_VARIED = (  # what varies besides, on these layouts
    "{}-4ranks-cp2-tp2-sp",
    "{}-4ranks-cp2-pp2",
    "{}-8ranks-cp2-tp2-sp-pp2",
)
_VARIATIONS = ("none", "single", "seqmean", "seqsum", "teach-entropy", "qwen2", "starcoder2")
_NO_GROUPS = ((4, "3"), (6, "4"), (6, "3"), (8, "6"), (4, "2+3"))  # sizes that cannot be had
_PLAIN = [column for column in COLUMNS if column not in ("poisoned", "few", "text", "refused")]


def profile_cases(profile: str, *, num_texts: int = 0) -> tuple[Case, ...]:
    """The cases of a profile, those of one world and layout together.

    Args:
        num_texts: batches of real documents there are.
    Raises:
        ValueError: no such profile.
    """
    if profile not in PROFILES:
        raise ValueError(f"no profile {profile!r}; there are {', '.join(PROFILES)}")
    cases = {"quick": _quick, "default": _default, "deep": _deep}[profile](num_texts)
    alike = dict.fromkeys(cases)  # ranks are made for a world and a layout
    return tuple(sorted(alike, key=lambda case: (case.world, repr(case.parallel))))


def rows() -> tuple[str, ...]:
    """The rows of a matrix in order: padding cases, own lengths, schedulers, parallel layouts."""
    layouts = (parse_case(id).row for id in (*_LAYOUTS, *_MORE_LAYOUTS))
    return (*COLUMNS, "own", *SCHEDULERS, "schedulers", *dict.fromkeys(layouts))


def text_cases(num_texts: int, *, profile: str) -> tuple[Case, ...]:
    """The cases of a user's own documents: every batch on four ranks, at every CP size."""
    sizes = (2,) if profile == "quick" else CP_SIZES[4]
    return tuple(Case(f"text{n}", 4, ((size,),)) for n in range(num_texts) for size in sizes)


def _quick(num_texts: int) -> Iterator[Case]:
    for world, plan in _EVERY_SIZE:
        yield from (_with_plan(padding, world, plan) for padding in _PLAIN)
        yield _with_plan("poisoned_nan", world, plan)
        yield _with_plan("few", world, plan)
        if num_texts:
            yield _with_plan("text0", world, plan)
        yield from (_with_plan(f"refused_{refusal}", world, plan) for refusal in REFUSALS[:2])
    yield from (_with_plan("refused_size", world, plan) for world, plan in _NO_GROUPS)
    yield from (Case("ragged", world, ((world,),)) for world in (1, 2))
    yield from (Case(f"poisoned_{poison}", 4, ((2,),)) for poison in POISONS)
    yield from (_with_plan("ragged", 4, plan) for plan in (_ORDERS[4], "2.1.2"))
    yield from (Case("ragged", 4, ((2,),), mask=mask) for mask in MASKS)
    yield Case("ragged", 4, ((2,),), temperature="teach", loss="entropy")
    yield Case("ragged", 4, ((4,),), temperature="t0.7", loss="seqmean")
    yield Case("ragged", 4, ((4,),), temperature="t2", loss="seqsum")
    yield from (Case("ragged", 4, ((2,),), model=model) for model in _PLAIN_MODELS)
    yield from (parse_case(f"ragged-{plan}") for plan in _MIXED[:3])
    yield from map(parse_case, (*_PLANNED[:5], *_CUTS[:1], *_INTERRUPTED, *_LAYOUTS))


def _default(num_texts: int) -> Iterator[Case]:
    yield from _quick(num_texts)
    for world, sizes in CP_SIZES.items():
        for size in sizes:
            yield from _at_size(world, size)
    for padding in ("ragged", "short", "longtail"):
        yield from (_with_plan(padding, world, plan) for world, plan in _STEPS.items())
        yield from (_with_plan(padding, world, plan) for world, plan in _ORDERS.items())
    for padding in ("ragged", "short", "few", "poisoned_nan", "ones"):
        yield from (parse_case(f"{padding}-{plan}") for plan in _MIXED)
    yield from map(parse_case, (*_PLANNED, *_CUTS, *_MORE_INTERRUPTED, *_MORE_LAYOUTS))
    for layout in _VARIED:
        for padding in ("short", "ones", "longtail", "few", "poisoned_nan", "poisoned_huge"):
            yield parse_case(layout.format(padding))
        for varied in _VARIATIONS:
            yield parse_case(f"{layout.format('ragged')}-{varied}")
    for number in range(1, min(num_texts, 3)):
        yield from (Case(f"text{number}", 4, ((size,),)) for size in (1, 2, 4))


def _at_size(world: int, size: int) -> Iterator[Case]:
    """The padding cases of one world at one CP size, and on 4 and 8 ranks what varies besides."""
    cp = ((size,),)
    yield from (Case(padding, world, cp) for padding in _PLAIN)
    if world > 2:
        yield from (Case(f"poisoned_{poison}", world, cp) for poison in POISONS)
    if world > 1:
        yield Case("few", world, cp)
    if world in (4, 8):
        yield Case("few_one", world, cp)
        for padding in ("ragged", "longtail"):
            yield from (Case(padding, world, cp, mask=mask) for mask in MASKS)
    if world == 4:
        yield from (Case("ragged", world, cp, model=model) for model in _PLAIN_MODELS)
        for temperature, loss in zip(TEMPERATURES, LOSSES, strict=True):
            yield Case("uneven", world, cp, temperature=temperature, loss=loss)


def _deep(num_texts: int) -> Iterator[Case]:
    yield from _default(num_texts)
    for world, sizes in CP_SIZES.items():
        for size in sizes:
            for padding in _PLAIN:
                for mask in MASKS:
                    yield Case(padding, world, ((size,),), mask=mask)
                yield from (
                    Case(padding, world, ((size,),), model=model) for model in _PLAIN_MODELS
                )
                yield from (
                    Case(padding, world, ((size,),), temperature=temperature, loss=loss)
                    for temperature in TEMPERATURES
                    for loss in LOSSES
                )
    yield from text_cases(num_texts, profile="deep")


def _with_plan(padding: str, world: int, plan: str) -> Case:
    cp = tuple(tuple(map(int, part.split("+"))) for part in plan.split("."))
    return Case(padding, world, cp)
