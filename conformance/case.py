"""A case: lengths, world, CP plan, mask and model, with an id that a person can type.

An id reads `PADDING-WORLDranks-cpPLAN`, then whatever differs from the default:

    ragged-4ranks-cp2                  one micro-batch at CP 2 on four ranks
    ragged-4ranks-cp4+2+1              three micro-batches of one step, gradients added up
    ragged-4ranks-cp4+2_1_1            the second has groups of two, one and one rank
    ragged-4ranks-cp2.1.2              three passes on one model: A, B and A again
    ragged-4ranks-cpbalanced24         planned by a scheduler, with at most 24 tokens a rank
    poisoned_nan-8ranks-cp4-single     mask with a single valid token
    lens5_13_1-2ranks-cp2-qwen3-t0.7   lengths spelled out, another model, temperature 0.7
    ragged-8ranks-cp2-tp2-sp-pp2       tensor, sequence and pipeline parallel; DP×CP is 2
    ragged-4ranks-cp2.2-interrupted    the second pass fails inside a layer before it is run
    ragged-4ranks-cp1.4-mixtral-replay the experts of every token are given
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from .lengths import COLUMNS, POISONS, REFUSALS, case_lengths
from .models import MODEL_SPECS
from .protocol import ALONE, Parallel, Schedule

MASKS = ("uneven", "full", "single", "shard", "rank", "none")
TEMPERATURES = ("t1", "t0.7", "t2", "teach")
LOSSES = ("tokenmean", "seqmean", "seqsum", "entropy")
MODELS = tuple(MODEL_SPECS)
_DEFAULTS = {"mask": "uneven", "temperature": "t1", "loss": "tokenmean", "model": "llama"}
_PADDINGS = (
    *(column for column in COLUMNS if column not in ("poisoned", "refused", "text")),
    "few_one",
    *(f"poisoned_{poison}" for poison in POISONS),
    *(f"refused_{refusal}" for refusal in REFUSALS),
)
_CHOICES = {"mask": MASKS, "temperature": TEMPERATURES, "loss": LOSSES, "model": MODELS}


SCHEDULERS = ("uniform", "balanced", "megatron")
_PARALLEL = {  # by how ids spell them
    "tp": "tp_size",
    "sp": "sequence_parallel",
    "pp": "pp_size",
    "vpp": "vpp_size",
    "ep": "ep_size",
    "static": "static_cp_size",
    "recompute": "recompute",
    "distopt": "distributed_optimizer",
}

_FLAGS = ("interrupted", "replay")

Step = tuple[int | tuple[int, ...], ...]
"""For each micro-batch the CP size of its groups, or of every group where they differ."""


@dataclass(frozen=True)
class Case:
    """One run of a batch on a world of ranks.

    Args:
        padding: what the lengths are like; `poisoned_nan` is column `poisoned`.
        world: ranks. cp: per pass, its micro-batches, or who plans it.
        mask, temperature, loss, model: names from the tuples above.
        parallel: how the model is spread. interrupted: `Task.interrupted`. replay: experts are
            given to tokens, see `Task.routing`.
    """

    padding: str
    world: int
    cp: tuple[Step | Schedule, ...]
    mask: str = "uneven"
    temperature: str = "t1"
    loss: str = "tokenmean"
    model: str = "llama"
    parallel: Parallel = ALONE
    interrupted: bool = False
    replay: bool = False

    @property
    def id(self) -> str:
        plan = ".".join(map(_spell, self.cp))
        extras = [
            getattr(self, field)
            for field, usual in _DEFAULTS.items()
            if getattr(self, field) != usual
        ]
        extras += [*_words(self.parallel), *(word for word in _FLAGS if getattr(self, word))]
        return "-".join([self.padding, f"{self.world}ranks", f"cp{plan}", *extras])

    @property
    def num_dp_cp_ranks(self) -> int:
        """Ranks that share the samples."""
        return self.world // self.parallel.model_size

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """The CP sizes of every micro-batch of every pass; of a scheduler's, the range it has."""
        return tuple(
            size
            for step in self.cp
            for sizes in ((1, self.num_dp_cp_ranks) if isinstance(step, Schedule) else step)
            for size in (sizes if isinstance(sizes, tuple) else (sizes,))
        )

    @property
    def column(self) -> str:
        """The padding case it belongs to."""
        return (
            "own"
            if self.padding.startswith("lens")
            else self.padding.partition("_")[0].rstrip("0123456789")
        )

    @property
    def row(self) -> str:
        """Where it stands in the matrix: by its layout, by its scheduler, or its padding case."""
        if self.parallel != ALONE:
            return "-".join(_words(self.parallel))
        planned = {step.scheduler for step in self.cp if isinstance(step, Schedule)}
        if not planned:
            return self.column
        return planned.pop() if len(planned) == 1 else "schedulers"

    @property
    def expects_refusal(self) -> bool:
        return self.column == "refused"

    @property
    def seqlens(self) -> tuple[int, ...]:
        """Its lengths; a text's are known once its file is read."""
        return case_lengths(self.padding, world=self.num_dp_cp_ranks, cp_sizes=self.cp_sizes)


def parse_case(text: str) -> Case:
    """The case of an id.

    Raises:
        ValueError: not an id; says which part is not understood and what could stand there.

    >>> parse_case("ragged-4ranks-cp4+2_1_1.1-single").cp
    ((4, (2, 1, 1)), (1,))
    """
    head = re.fullmatch(r"([a-z][a-z0-9_]*)-(\d+)ranks?-cp([a-z\d+_.]+?)((?:-[a-z0-9.]+)*)", text)
    if head is None:
        raise ValueError(
            f"{text!r} is not a case id; ids look like ragged-4ranks-cp2 or "
            "lens5_13_1-2ranks-cp2+1-single"
        )
    padding, world, plan, extras = head.groups()
    try:
        cp = tuple(map(_read_step, plan.split(".")))
    except ValueError:
        raise ValueError(
            f"{text!r}: cp{plan} is no plan; write cp2, cp4+2, cp4+2_1_1, cp2.1.2 or cpbalanced24"
        ) from None
    case = Case(padding, int(world), cp)
    for extra in filter(None, extras.split("-")):
        case = _with_extra(case, extra, text)
    if case.world < 1 or min(case.cp_sizes) < 1:
        raise ValueError(f"{text!r}: ranks and CP sizes start at 1")
    _check_padding(padding, text)
    _check_parallel(case, text)
    return case


def _spell(step: Step | Schedule) -> str:
    if isinstance(step, Schedule):
        return f"{step.scheduler}{step.max_seqlen_per_dp_cp_rank}"
    return "+".join(
        "_".join(map(str, sizes)) if isinstance(sizes, tuple) else str(sizes) for sizes in step
    )


def _read_step(text: str) -> Step | Schedule:
    planned = re.fullmatch(rf"({'|'.join(SCHEDULERS)})(\d+)", text)
    if planned:
        return Schedule(planned[1], int(planned[2]))
    groups = [tuple(map(int, part.split("_"))) for part in text.split("+")]
    return tuple(sizes if len(sizes) > 1 else sizes[0] for sizes in groups)


def _words(parallel: Parallel) -> Iterator[str]:
    """What differs from no parallelism at all, as ids spell it."""
    usual = {field.name: field.default for field in fields(Parallel)}
    for word, name in _PARALLEL.items():
        value = getattr(parallel, name)
        if value != usual[name]:
            yield word if value is True else f"{word}{value}"


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


def _check_parallel(case: Case, text: str) -> None:
    """Refuse a layout that the world cannot have, or in which nothing can be interrupted."""
    layout = case.parallel
    unit = layout.model_size * math.lcm(layout.static_cp_size, layout.ep_size)
    if case.world % unit:
        raise ValueError(
            f"{text!r}: {case.world} ranks are no multiple of the {unit} that "
            f"{'-'.join(_words(case.parallel))} takes"
        )
    if case.interrupted and case.parallel.pp_size > 1:
        raise ValueError(
            f"{text!r}: a pass is not interrupted with pipeline stages: all but the last would "
            "wait for it; leave out interrupted or pp"
        )
    if case.replay and MODEL_SPECS[case.model].moe is None:
        raise ValueError(f"{text!r}: {case.model} has no experts to replay; leave out replay")
    if case.interrupted and len(case.cp) < 2:
        raise ValueError(f"{text!r}: the first pass is not interrupted; write cp2.2 or cp2.1.2")


def _with_extra(case: Case, extra: str, text: str) -> Case:
    for field, choices in _CHOICES.items():
        if extra in choices:
            return replace(case, **{field: extra})  # type: ignore[arg-type]
    if extra in _FLAGS:
        return replace(case, **{extra: True})  # type: ignore[arg-type]
    word = extra.rstrip("0123456789")
    number = extra[len(word) :]
    name = _PARALLEL.get(word)
    if name is not None and bool(number) == name.endswith("size"):
        value = {name: int(number) if number else True}
        return replace(case, parallel=replace(case.parallel, **value))  # type: ignore[arg-type]
    known = ", ".join(choice for choices in _CHOICES.values() for choice in choices)
    raise ValueError(
        f"{text!r}: {extra!r} is not one of {known}, tp2, sp, pp2, vpp2, ep2, static2, "
        "recompute, distopt, interrupted, replay"
    )
