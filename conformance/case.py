"""A case: lengths, world, CP plan, mask and model, with an id that a person can type.

An id reads `PADDING-WORLDranks-cpPLAN`, then whatever differs from the default:

    ragged-4ranks-cp2                  one micro-batch at CP 2 on four ranks
    ragged-4ranks-cp4+2+1              three micro-batches of one step, gradients added up
    ragged-4ranks-cp2.1.2              three passes on one model: A, B and A again
    poisoned_nan-8ranks-cp4-single     mask with a single valid token
    lens5_13_1-2ranks-cp2-qwen3-t0.7   lengths spelled out, another model, temperature 0.7
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .lengths import COLUMNS, POISONS, REFUSALS, case_lengths

MASKS = ("uneven", "full", "single", "shard", "rank", "none")
TEMPERATURES = ("t1", "t0.7", "t2", "teach")
LOSSES = ("tokenmean", "seqmean", "entropy")
MODELS = ("llama", "qwen2", "qwen3", "starcoder2", "gptj", "mqa")
_DEFAULTS = {"mask": "uneven", "temperature": "t1", "loss": "tokenmean", "model": "llama"}
_PADDINGS = (
    *(column for column in COLUMNS if column not in ("poisoned", "refused", "text")),
    "few_one",
    *(f"poisoned_{poison}" for poison in POISONS),
    *(f"refused_{refusal}" for refusal in REFUSALS),
)
_CHOICES = {"mask": MASKS, "temperature": TEMPERATURES, "loss": LOSSES, "model": MODELS}


@dataclass(frozen=True)
class Case:
    """One run of a batch on a world of ranks.

    Args:
        padding: what the lengths are like; `poisoned_nan` is column `poisoned`.
        world: ranks. cp: per pass, the CP size of each micro-batch.
        mask, temperature, loss, model: names from the tuples above.
    """

    padding: str
    world: int
    cp: tuple[tuple[int, ...], ...]
    mask: str = "uneven"
    temperature: str = "t1"
    loss: str = "tokenmean"
    model: str = "llama"

    @property
    def id(self) -> str:
        plan = ".".join("+".join(map(str, sizes)) for sizes in self.cp)
        extras = [
            getattr(self, field)
            for field, usual in _DEFAULTS.items()
            if getattr(self, field) != usual
        ]
        return "-".join([self.padding, f"{self.world}ranks", f"cp{plan}", *extras])

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """The CP size of every micro-batch of every pass, in order."""
        return tuple(size for sizes in self.cp for size in sizes)

    @property
    def column(self) -> str:
        """The padding case it belongs to in the matrix."""
        return (
            "own"
            if self.padding.startswith("lens")
            else self.padding.partition("_")[0].rstrip("0123456789")
        )

    @property
    def expects_refusal(self) -> bool:
        return self.column == "refused"

    @property
    def seqlens(self) -> tuple[int, ...]:
        """Its lengths; a text's are known once its file is read."""
        return case_lengths(self.padding, world=self.world, cp_sizes=self.cp_sizes)


def parse_case(text: str) -> Case:
    """The case of an id.

    Raises:
        ValueError: not an id; says which part is not understood and what could stand there.

    >>> parse_case("ragged-4ranks-cp4+2.1-single").cp
    ((4, 2), (1,))
    """
    head = re.fullmatch(r"([a-z][a-z0-9_]*)-(\d+)ranks?-cp([\d+.]+?)((?:-[a-z0-9.]+)*)", text)
    if head is None:
        raise ValueError(
            f"{text!r} is not a case id; ids look like ragged-4ranks-cp2 or "
            "lens5_13_1-2ranks-cp2+1-single"
        )
    padding, world, plan, extras = head.groups()
    try:
        cp = tuple(tuple(int(size) for size in part.split("+")) for part in plan.split("."))
    except ValueError:
        raise ValueError(f"{text!r}: cp{plan} is no plan; write cp2, cp4+2 or cp2.1.2") from None
    if int(world) < 1 or min(min(sizes) for sizes in cp) < 1:
        raise ValueError(f"{text!r}: ranks and CP sizes start at 1")
    case = Case(padding, int(world), cp)
    for extra in filter(None, extras.split("-")):
        case = _with_extra(case, extra, text)
    _check_padding(padding, text)
    return case


def _check_padding(padding: str, text: str) -> None:
    """Refuse a padding case, or a kind of one, that does not exist."""
    if padding.startswith("lens"):
        lengths = padding.removeprefix("lens").split("_")
        if not all(length.isdecimal() and int(length) for length in lengths):
            raise ValueError(f"{text!r}: write lengths of 1 and more as lens5_13_1")
    elif not re.fullmatch(r"text\d+", padding) and padding not in _PADDINGS:
        raise ValueError(
            f"{text!r}: padding {padding!r} is not one of {', '.join(_PADDINGS)}, text0, lens5_1"
        )


def _with_extra(case: Case, extra: str, text: str) -> Case:
    for field, choices in _CHOICES.items():
        if extra in choices:
            return replace(case, **{field: extra})  # type: ignore[arg-type]
    known = ", ".join(choice for choices in _CHOICES.values() for choice in choices)
    raise ValueError(f"{text!r}: {extra!r} is not one of {known}")
