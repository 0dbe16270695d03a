"""Ranks compute, the parent judges: replies of all ranks against the oracle, check by check.

Each check answers with a `Finding`: how far off, what is allowed, the first place that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from .finding import Finding
from .judge_layout import check_layout
from .protocol import Oracle, Outputs, Pack, Plan, Schedule, Task

BUDGET = 1e-9
"""Relative error allowed in float64: seven digits above rounding, far below any wrong row."""

GRADIENT_FLOOR = 1e-4
"""A parameter's error is relative to its own largest gradient, or to this share of the largest
gradient of all where its own is smaller: below it rounding is all there is."""


def judge(
    task: Task, replies: Sequence[tuple[Outputs, ...]], oracle: Oracle, truth: Outputs
) -> list[Finding]:
    """Every check of a task that all ranks have answered.

    Args:
        replies: per rank, per pass. truth: the oracle's outputs of the same batch.
    """
    findings: list[Finding] = []
    for number, step in enumerate(task.passes):
        outputs = [reply[number] for reply in replies]
        found = _judge_pass(task, step, outputs, oracle, truth)
        findings += _in_pass(found, number) if len(task.passes) > 1 else found
    if len(task.passes) > 1:
        findings.append(check_order(task.passes, replies))
    return _worst_of_each(findings)


def _judge_pass(
    task: Task,
    step: Plan | Schedule,
    outputs: Sequence[Outputs],
    oracle: Oracle,
    truth: Outputs,
) -> list[Finding]:
    findings = []
    if any(output.packs for output in outputs):
        findings.append(check_layout(task, step, outputs, oracle))
    elif isinstance(step, Schedule):
        reason = "packs are not shown, so what was planned cannot be seen"
        findings.append(Finding("layout", float("inf"), 0.0, reason=reason))
    holders = _Holders(outputs)
    stages = task.parallel.pp_size
    first_ranks = outputs[:: len(outputs) // stages]  # of every stage
    last = first_ranks[-1]
    gradients = [output.gradients for output in first_ranks]
    return [
        *findings,
        check_tokens("logits", last.logits, truth.logits, holders),
        check_tokens("logprobs", last.logprobs, truth.logprobs, holders),
        check_tokens("entropy", last.entropy, truth.entropy, holders),
        check_loss(last.loss, truth.loss),
        check_gradients(gradients, truth.gradients),
        check_merge(outputs, num_stages=stages),
    ]


def check_tokens(
    name: str, got: Sequence[Tensor], expected: Sequence[Tensor], holders: _Holders
) -> Finding:
    """Per-sequence outputs, relative to the largest value of the truth."""
    shapes = [tuple(t.shape) for t in got], [tuple(t.shape) for t in expected]
    if shapes[0] != shapes[1]:
        return Finding(
            name, float("inf"), BUDGET, reason=f"shapes are {shapes[0]}, not {shapes[1]}"
        )
    scale = max((float(t.abs().max()) for t in expected), default=0.0) or 1.0
    worst, bad = 0.0, ""
    for sequence, (mine, true) in enumerate(zip(got, expected, strict=True)):
        errors = _finite_or_inf((mine.double() - true).abs() / scale)
        per_token = errors.flatten(1).amax(1) if errors.dim() > 1 else errors
        worst = max(worst, float(per_token.max()))
        if not bad and worst > BUDGET:
            token = int((per_token > BUDGET).nonzero()[0])
            entry = int(errors[token].argmax())
            bad = f"sequence {sequence}, token {token}{holders.of(sequence, token)}"
            bad += f", entry {entry}" if mine.dim() > 1 else ""
            pair = mine[token].flatten()[entry], true[token].flatten()[entry]
            bad += f": got {_short(pair[0])}, expected {_short(pair[1])}"
    return _finding(name, worst, BUDGET, bad)


def check_loss(got: Tensor, expected: Tensor) -> Finding:
    """The loss of the batch, relative."""
    if got.numel() != 1:
        reason = f"it has shape {tuple(got.shape)}, not that of one number"
        return Finding("loss", float("inf"), BUDGET, reason=reason)
    error = _finite_or_inf((got.double() - expected).abs() / (expected.abs() + (expected == 0)))
    where = f"got {float(got):.12g}, expected {float(expected):.12g}"
    return _finding("loss", float(error), BUDGET, where)


def check_gradients(
    stages: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor]
) -> Finding:
    """Every parameter's gradient, in absolute scale, relative to that parameter's own size.

    Args:
        stages: per pipeline stage, of its own layers. What several of them hold, as a tied
            embedding, has to be right on each.
    """
    if odd := set().union(*stages) ^ set(expected):
        reason = f"not the same parameters: {', '.join(sorted(odd))}"
        return Finding("gradients", float("inf"), BUDGET, reason=reason)
    largest = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    floor = GRADIENT_FLOOR * max(largest.values())
    worst, where = 0.0, ""
    for stage, name in ((stage, name) for stage, got in enumerate(stages) for name in got):
        mine, true = stages[stage][name], expected[name]
        on_stage = f" on stage {stage}" if len(stages) > 1 else ""
        if mine.shape != true.shape:
            reason = f"{name}{on_stage} has {tuple(mine.shape)}, not {tuple(true.shape)}"
            return Finding("gradients", float("inf"), BUDGET, reason=reason)
        scale = max(largest[name], floor)
        difference = (mine.double() - true).abs()
        errors = _finite_or_inf(
            difference / scale if scale else difference.where(difference == 0, float("inf"))
        )
        if float(errors.max()) > worst:
            worst = float(errors.max())
            place = tuple((errors == errors.max()).nonzero()[0].tolist())
            where = f"{name}{list(place)}{on_stage}: got {_short(mine[place])}, "
            where += f"expected {_short(true[place])}"
    slope = _slope(stages, expected)
    if worst > BUDGET and slope:
        where += f"; all gradients together are {slope:.6g} times the truth"
    return _finding("gradients", worst, BUDGET, where)


def check_merge(outputs: Sequence[Outputs], *, num_stages: int = 1) -> Finding:
    """Merged outputs, loss and gradients are the same bits on every rank that has them.

    All ranks must, but with pipeline stages gradients are those of each stage, and only the last
    one must have outputs: an earlier stage has the same ones, or none.
    """
    where = next(_unlike(outputs, num_stages), "")
    return Finding("merge", float("inf") if where else 0.0, 0.0, where)


def _unlike(outputs: Sequence[Outputs], num_stages: int) -> Iterator[str]:
    """What a rank has not as the first rank of its stage, or of the last one, has it."""
    size = len(outputs) // num_stages
    last = size * (num_stages - 1)
    for rank, output in enumerate(outputs):
        first = rank // size * size
        for name, mine, other in _gradient_pairs(output, outputs[first]):
            if mine is not other and not _same_bits(mine, other):
                yield f"{name} on rank {rank} is not rank {first}'s"
        for name, mine, other in _output_pairs(output, outputs[last], may_be_empty=rank < last):
            if mine is not other and not _same_bits(mine, other):
                yield f"{name} on rank {rank} is not rank {last}'s"
    for rank, output in enumerate(outputs):
        if not _same_bits(output.loss, outputs[0].loss):
            yield f"loss on rank {rank} is not rank 0's"


def check_order(
    passes: Sequence[Plan | Schedule], replies: Sequence[tuple[Outputs, ...]]
) -> Finding:
    """Passes with the same plan give the same bits, whatever ran in between."""
    for rank, reply in enumerate(replies):
        for later, plan in enumerate(passes):
            earlier = passes.index(plan)
            for name, mine, first in _all_pairs(reply[later], reply[earlier]):
                if not _same_bits(mine, first):
                    where = f"{name} on rank {rank}: pass {later} is not pass {earlier}"
                    return Finding("order", float("inf"), 0.0, where)
    return Finding("order", 0.0, 0.0)


@dataclass(frozen=True)
class _Holders:
    """Which rank computed which token, as far as the packs tell."""

    outputs: Sequence[Outputs]

    def of(self, sequence: int, token: int) -> str:
        for rank, output in enumerate(self.outputs):
            for pack in output.packs:
                if sequence in pack.samples and self._has(pack, sequence, token):
                    return f", rank {rank} of CP group {list(pack.cp_ranks)}"
        return ""

    def _has(self, pack: Pack, sequence: int, token: int) -> bool:
        bounds = (pack.cu_seqlens_padded // max(len(pack.cp_ranks), 1)).tolist()
        place = pack.samples.index(sequence)
        if len(bounds) <= place + 1:
            return False  # a pack that the layout check has turned down
        return token in pack.position_ids[bounds[place] : bounds[place + 1]].tolist()


_Pair = tuple[str, Tensor | None, Tensor | None]
"""What it is, and that of two ranks: None where one of them has it and the other has not."""


def _output_pairs(mine: Outputs, first: Outputs, *, may_be_empty: bool = False) -> Iterator[_Pair]:
    """Every output per sequence."""
    for name in ("logits", "logprobs", "entropy"):
        held = getattr(mine, name)
        if held or not may_be_empty:
            pairs = zip_longest(held, getattr(first, name))
            yield from ((f"{name} of sequence {i}", *pair) for i, pair in enumerate(pairs))


def _gradient_pairs(mine: Outputs, first: Outputs) -> Iterator[_Pair]:
    for name in {**first.gradients, **mine.gradients}:
        yield f"gradient of {name}", mine.gradients.get(name), first.gradients.get(name)


def _all_pairs(mine: Outputs, first: Outputs) -> Iterator[_Pair]:
    yield from _output_pairs(mine, first)
    yield "loss", mine.loss, first.loss
    yield from _gradient_pairs(mine, first)


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _slope(stages: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor]) -> float:
    """⟨g, g_true⟩ / ⟨g_true, g_true⟩: 1 if right, the factor if a factor is wrong."""
    pairs = [(mine, expected[name]) for stage in stages for name, mine in stage.items()]
    norm = sum(float((true * true).sum()) for _, true in pairs)
    return sum(float((mine * true).sum()) for mine, true in pairs) / (norm or 1.0)


def _finding(check: str, error: float, budget: float, where: str) -> Finding:
    return Finding(check, error, budget, where if not error <= budget else "")


def _finite_or_inf(errors: Tensor) -> Tensor:
    return errors.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _short(value: Tensor) -> str:
    return f"{float(value):.10g}"  # enough to see float32 rounding


def _in_pass(findings: Sequence[Finding], number: int) -> list[Finding]:
    return [
        Finding(
            f.check, f.error, f.budget, f"pass {number}: {f.where}" if f.where else "", f.reason
        )
        for f in findings
    ]


def _worst_of_each(findings: Sequence[Finding]) -> list[Finding]:
    """One finding per check: the first that failed, or the largest error."""
    by_check: dict[str, Finding] = {}
    for finding in findings:
        known = by_check.get(finding.check)
        if known is None or (known.passed and not known.error >= finding.error):
            by_check[finding.check] = finding
    return list(by_check.values())
