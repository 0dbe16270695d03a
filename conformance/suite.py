"""One run of the suite: cases in, verdicts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .build import TaskBuilder
from .case import Case
from .finding import Finding
from .judge import judge
from .pool import RankPools, RankReply
from .protocol import Loss, Oracle, Outputs, Task, load
from .rank_error import RankError, from_exception
from .verdict import CheckResult, Verdict


@dataclass
class Suite:
    """An implementation under test beside the oracle.

    Args:
        implementation: dotted name of its module. pools: where its ranks run.
        builder: makes tasks of cases.
        rerun: what stands before a case id in the command that repeats it.
    """

    implementation: str
    pools: RankPools
    oracle: Oracle
    builder: TaskBuilder
    rerun: str = "python -m tools verify --case"
    _truths: dict[tuple[object, ...], Outputs] = field(default_factory=dict)
    _known: dict[Case, list[CheckResult]] = field(default_factory=dict, init=False)

    def verify(self, case: Case) -> list[CheckResult]:
        """Run a case and judge it; whatever goes wrong is a verdict, nothing raises.

        Asked again, it answers what it found the first time.
        """
        if case not in self._known:
            self._known[case] = self._verdicts(case)
        return self._known[case]

    def _verdicts(self, case: Case) -> list[CheckResult]:
        try:
            return self._verify(case)
        except Exception as error:  # noqa: BLE001 - of the suite; the case must stay in the report
            found = from_exception(error)
            reason = f"the suite failed: {found.type}: {found.message}"
            return [self._line(case, "suite", Verdict.FAIL, where=found.where, reason=reason)]

    def _verify(self, case: Case) -> list[CheckResult]:
        task = self.builder.task(case)
        lacking = task.needs and task.needs - _supports(self.implementation)
        if lacking:
            reason = f"{', '.join(sorted(lacking))}: not in the SUPPORTS of {self.implementation}"
            return [self._line(case, "run", Verdict.UNSUPPORTED, reason=reason)]
        if case.expects_refusal:
            return [self._refused(case, task)]
        replies = self._run(case, task)
        error = _first_error(replies)
        if error is not None:
            return [self._failed(case, *error)]
        outputs = [reply.outputs for reply in replies if reply.outputs is not None]
        findings = judge(task, outputs, self.oracle, self.truth(task))
        return [self._result(case, finding) for finding in findings]

    def truth(self, task: Task) -> Outputs:
        """The oracle's outputs of a task's batch, computed once for all worlds and plans."""
        key = _truth_key(task)
        if key not in self._truths:
            if len(self._truths) >= 64:
                self._truths.pop(next(iter(self._truths)))
            self._truths[key] = self.oracle.evaluate(
                task.model, task.weights, task.batch, task.loss
            )
        return self._truths[key]

    def _run(self, case: Case, task: Task, only_rank: int | None = None) -> Sequence[RankReply]:
        pool = self.pools.pool(self.implementation, case.world, parallel=case.parallel)
        return pool.run(task, only_rank=only_rank)

    def _refused(self, case: Case, task: Task) -> CheckResult:
        """A task that cannot be had, given to one rank alone.

        If that rank enters a collective first, nobody answers there and the time limit ends it.
        """
        (reply,) = self._run(case, task, only_rank=0)
        if reply.error is not None and reply.error.kind == "unsupported":
            return self._failed(case, reply.rank, reply.error)
        return self._result(case, _refusal(reply))

    def _failed(self, case: Case, rank: int, error: RankError) -> CheckResult:
        verdict = Verdict.UNSUPPORTED if error.kind == "unsupported" else Verdict.FAIL
        said = error.message if error.kind == "unsupported" else f"{error.type}: {error.message}"
        return self._line(case, "run", verdict, where=_place(rank, error), reason=said)

    def _result(self, case: Case, finding: Finding) -> CheckResult:
        verdict = Verdict.PASS if finding.passed else Verdict.FAIL
        reason = finding.reason
        if not finding.passed and not reason:
            reason = f"{finding.check} wrong"
            if finding.budget:
                reason += f": error {finding.error:.1e}, allowed {finding.budget:.0e}"
        return self._line(
            case, finding.check, verdict, finding.error, finding.budget, finding.where, reason
        )

    def _line(
        self,
        case: Case,
        check: str,
        verdict: Verdict,
        error: float | None = None,
        budget: float | None = None,
        where: str = "",
        reason: str = "",
    ) -> CheckResult:
        return CheckResult(
            id=case.id,
            check=check,
            lengths=self.builder.seqlens(case),
            world=case.world,
            cp=case.cp_sizes,
            padding=case.row,
            verdict=verdict,
            error=error,
            budget=budget,
            where=where,
            reason=reason,
            rerun=f"{self.rerun} {case.id}",
        )


_BLAME = ("died", "raised", "refused", "unsupported", "timeout")
"""Whom to name when ranks disagree: who waits does so for another, and what one rank does not
support excuses no error of another."""


def _supports(implementation: str) -> frozenset[str]:
    """What the ranks of an implementation can do besides, see `Task.needs`."""
    return frozenset(getattr(load(implementation), "SUPPORTS", ()))


def _refusal(reply: RankReply) -> Finding:
    """Whether a rank refused in words what cannot be had, before any collective."""
    error = reply.error
    if error is None:
        reason = "it was accepted; a clear ValueError is expected"
    elif error.kind == "refused" and error.message:
        return Finding("refusal", 0.0, 0.0, reason=f"refused: {error.message}")
    elif error.kind == "refused":
        reason = "raised a ValueError without a word"
    elif error.kind == "timeout":
        reason = f"not refused before the first collective: {error.message}"
    else:
        reason = f"raised {error.type}, not ValueError: {error.message}"
    return Finding("refusal", float("inf"), 0.0, _place(reply.rank, error), reason)


def _first_error(replies: Sequence[RankReply]) -> tuple[int, RankError] | None:
    errors = [(reply.rank, reply.error) for reply in replies if reply.error]
    return min(errors, key=lambda error: _BLAME.index(error[1].kind), default=None)


def _place(rank: int, error: RankError | None) -> str:
    return f"rank {rank}, {error.where}" if error and error.where else f"rank {rank}"


def _truth_key(task: Task) -> tuple[object, ...]:
    batch, loss = task.batch, task.loss
    return (
        task.model,
        _fingerprint(batch.input_ids),
        _fingerprint(batch.loss_mask),
        batch.temperature,
        Loss(loss.aggregation, loss.entropy_coeff),
        _fingerprint(tuple(task.weights.values())[:1]),
    )


def _fingerprint(tensors: Sequence[object]) -> int:
    return hash(tuple(tensor.numpy().tobytes() for tensor in tensors))  # type: ignore[attr-defined]
