"""Ranks compute, the parent judges: replies of all ranks against the oracle, check by check.

Each check answers with a `Finding`: how far off, what is allowed, the first place that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from .protocol import Oracle, Outputs, Pack, Plan, Task

BUDGET = 1e-9
"""Relative error allowed in float64: seven digits above rounding, far below any wrong row."""

GRADIENT_FLOOR = 1e-4
"""A parameter's error is relative to its own largest gradient, or to this share of the largest
gradient of all where its own is smaller: below it rounding is all there is."""


@dataclass(frozen=True)
class Finding:
    """What one check found. `error` is None for exact checks that hold."""

    check: str
    error: float
    budget: float
    where: str = ""
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.budget  # NaN is not


def judge(
    task: Task, replies: Sequence[tuple[Outputs, ...]], oracle: Oracle, truth: Outputs
) -> list[Finding]:
    """Every check of a task that all ranks have answered.

    Args:
        replies: per rank, per pass. truth: the oracle's outputs of the same batch.
    """
    findings: list[Finding] = []
    for number, plan in enumerate(task.passes):
        outputs = [reply[number] for reply in replies]
        found = _judge_pass(task, plan, outputs, oracle, truth)
        findings += _in_pass(found, number) if len(task.passes) > 1 else found
    if len(task.passes) > 1:
        findings.append(check_order(task.passes, replies))
    return _worst_of_each(findings)


def _judge_pass(
    task: Task, plan: Plan, outputs: Sequence[Outputs], oracle: Oracle, truth: Outputs
) -> list[Finding]:
    findings = []
    if any(output.packs for output in outputs):
        findings.append(check_layout(task, plan, outputs, oracle))
    holders = _Holders(plan, outputs)
    first = outputs[0]
    return [
        *findings,
        check_tokens("logits", first.logits, truth.logits, holders),
        check_tokens("logprobs", first.logprobs, truth.logprobs, holders),
        check_tokens("entropy", first.entropy, truth.entropy, holders),
        check_loss(first.loss, truth.loss),
        check_gradients(first.gradients, truth.gradients),
        check_merge(outputs),
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


def check_gradients(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Finding:
    """Every parameter's gradient, in absolute scale, relative to that parameter's own size."""
    if set(got) != set(expected):
        odd = ", ".join(sorted(set(got) ^ set(expected)))
        return Finding("gradients", float("inf"), BUDGET, reason=f"not the same parameters: {odd}")
    largest = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    floor = GRADIENT_FLOOR * max(largest.values())
    worst, where = 0.0, ""
    for name, true in expected.items():
        if got[name].shape != true.shape:
            return Finding(
                "gradients",
                float("inf"),
                BUDGET,
                reason=f"{name} has {tuple(got[name].shape)}, not {tuple(true.shape)}",
            )
        scale = max(largest[name], floor)
        difference = (got[name].double() - true).abs()
        errors = _finite_or_inf(
            difference / scale if scale else difference.where(difference == 0, float("inf"))
        )
        if float(errors.max()) > worst:
            worst = float(errors.max())
            place = tuple((errors == errors.max()).nonzero()[0].tolist())
            where = f"{name}{list(place)}: got {_short(got[name][place])}, "
            where += f"expected {_short(true[place])}"
    slope = _slope(got, expected)
    if worst > BUDGET and slope:
        where += f"; all gradients together are {slope:.6g} times the truth"
    return _finding("gradients", worst, BUDGET, where)


def check_merge(outputs: Sequence[Outputs]) -> Finding:
    """Merged outputs, loss and summed gradients are the same bits on every rank."""
    for rank, other in enumerate(outputs[1:], start=1):
        for name, mine, first in _pairs(other, outputs[0]):
            if mine is not first and not _same_bits(mine, first):
                return Finding(
                    "merge", float("inf"), 0.0, f"{name} on rank {rank} is not rank 0's"
                )
    return Finding("merge", 0.0, 0.0)


def check_order(passes: Sequence[Plan], replies: Sequence[tuple[Outputs, ...]]) -> Finding:
    """Passes with the same plan give the same bits, whatever ran in between."""
    for rank, reply in enumerate(replies):
        for later, plan in enumerate(passes):
            earlier = passes.index(plan)
            for name, mine, first in _pairs(reply[later], reply[earlier]):
                if not _same_bits(mine, first):
                    where = f"{name} on rank {rank}: pass {later} is not pass {earlier}"
                    return Finding("order", float("inf"), 0.0, where)
    return Finding("order", 0.0, 0.0)


def check_layout(task: Task, plan: Plan, outputs: Sequence[Outputs], oracle: Oracle) -> Finding:
    """Plan and packs, exactly: every sample once, right members, tokens, positions, labels."""
    wrong = next(_layout_faults(task, plan, outputs, oracle), "")
    return Finding("layout", float("inf") if wrong else 0.0, 0.0, wrong)


def _layout_faults(
    task: Task, plan: Plan, outputs: Sequence[Outputs], oracle: Oracle
) -> Iterator[str]:
    for rank, output in enumerate(outputs):
        if len(output.packs) != len(plan):
            yield f"rank {rank} ran {len(output.packs)} micro-batches of {len(plan)}"
    for number, micro_batch in enumerate(plan):
        packs = [output.packs[number] for output in outputs]
        size = micro_batch.cp_size
        leaders = packs[::size]
        held = sorted(sample for pack in leaders for sample in pack.samples)
        if held != sorted(micro_batch.samples):
            yield f"micro-batch {number} holds samples {held}, not {sorted(micro_batch.samples)}"
        for rank, pack in enumerate(packs):
            first = rank - rank % size
            members = tuple(range(first, first + size))
            place = f"micro-batch {number}, rank {rank}"
            if pack.cp_ranks != members:
                yield f"{place}: CP group is ranks {list(pack.cp_ranks)}, not {list(members)}"
            elif pack.samples != packs[first].samples:
                yield f"{place}: samples {pack.samples}, rank {first} has {packs[first].samples}"
            else:
                yield from _pack_faults(task, pack, rank % size, oracle, place)


def _pack_faults(
    task: Task, pack: Pack, cp_rank: int, oracle: Oracle, place: str
) -> Iterator[str]:
    if not pack.samples:
        if not (pack.tokens == task.padding.token_id).all():
            yield f"{place}: no samples, but tokens {pack.tokens.tolist()}"
        return
    true = oracle.pack(
        task.batch, pack.samples, cp_ranks=pack.cp_ranks, cp_rank=cp_rank, padding=task.padding
    )
    for name in ("cu_seqlens_padded", "position_ids", "tokens", "labels"):
        mine, expected = getattr(pack, name).tolist(), getattr(true, name).tolist()
        if mine != expected:
            at = next(
                (
                    i
                    for i, pair in enumerate(zip(mine, expected, strict=False))
                    if pair[0] != pair[1]
                ),
                -1,
            )
            yield f"{place}: {name} {mine} should be {expected}, first wrong at row {at}"


@dataclass(frozen=True)
class _Holders:
    """Which rank computed which token, as far as the packs tell."""

    plan: Plan
    outputs: Sequence[Outputs]

    def of(self, sequence: int, token: int) -> str:
        for number, _ in enumerate(self.plan):
            for rank, output in enumerate(self.outputs):
                pack = output.packs[number] if number < len(output.packs) else None
                if pack and sequence in pack.samples and self._has(pack, sequence, token):
                    return f", rank {rank} of CP group {list(pack.cp_ranks)}"
        return ""

    def _has(self, pack: Pack, sequence: int, token: int) -> bool:
        bounds = (pack.cu_seqlens_padded // max(len(pack.cp_ranks), 1)).tolist()
        place = pack.samples.index(sequence)
        if len(bounds) <= place + 1:
            return False  # a pack that the layout check has turned down
        return token in pack.position_ids[bounds[place] : bounds[place + 1]].tolist()


def _pairs(mine: Outputs, first: Outputs) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Every output of two ranks by name, None where one of them has it and the other has not."""
    for name in ("logits", "logprobs", "entropy"):
        pairs = zip_longest(getattr(mine, name), getattr(first, name))
        yield from ((f"{name} of sequence {i}", *pair) for i, pair in enumerate(pairs))
    yield "loss", mine.loss, first.loss
    for name in {**first.gradients, **mine.gradients}:
        yield f"gradient of {name}", mine.gradients.get(name), first.gradients.get(name)


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _slope(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """⟨g, g_true⟩ / ⟨g_true, g_true⟩: 1 if right, the factor if a factor is wrong."""
    norm = sum(float((true * true).sum()) for true in expected.values())
    return sum(float((got[name] * true).sum()) for name, true in expected.items()) / (norm or 1.0)


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
