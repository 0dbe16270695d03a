"""The contracts that public bugs break most, each proved by a few cases of the suite.

`conformance/test_contracts.py` has a test for each. A contract looks at its own checks of its
cases, which every profile runs anyway. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .matrix import worst_verdict
from .verdict import CheckResult, Verdict

_IN_ITS_PLACE = ("run", "suite")
"""What a case has instead of its checks where something went wrong before they could be made."""


@dataclass(frozen=True)
class Proof:
    """What one case says about a contract. reason: why it is no pass."""

    contract: str
    case: str
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """A promise that has to hold whatever runs.

    Args:
        name: in a few words. promise: in a sentence.
        checks: those that show it. cases: ids of the cases that prove it.
    """

    name: str
    promise: str
    checks: tuple[str, ...]
    cases: tuple[str, ...]

    def proof(self, case: str, results: Sequence[CheckResult]) -> Proof:
        """What the results of a case say: only a failure of a check of its own breaks it."""
        mine = [result for result in results if result.check in (*self.checks, *_IN_ITS_PLACE)]
        verdict = worst_verdict(result.verdict for result in mine)
        if verdict is None:
            wanted = " or ".join(self.checks)
            reason = f"no check of {wanted}: the implementation does not show what it takes"
            return Proof(self.name, case, Verdict.UNSUPPORTED, reason)
        worst = next(result for result in mine if result.verdict is verdict)
        words = "; ".join(filter(None, (worst.reason, worst.where)))
        reason = "" if verdict is Verdict.PASS else f"{worst.check}: {words}"
        return Proof(self.name, case, verdict, reason)


GROUPS = Contract(
    name="groups",
    promise="CP groups have the size asked for and the same members in the same order on every "
    "rank; a size that cannot be had is refused before any collective",
    checks=("layout", "refusal"),
    cases=(
        "ragged-4ranks-cp2",
        "few-3ranks-cp3",
        "uneven-6ranks-cp6",
        "ragged-8ranks-cp8",
        "ragged-4ranks-cp4+2+1",
        "ragged-4ranks-cp4+2_1_1",
        "ragged-6ranks-cp6+4_2",
        "ragged-4ranks-cpbalanced24",
        "ragged-8ranks-cp2+1-tp2-sp-pp2",
        "refused_size-4ranks-cp3",
        "refused_size-6ranks-cp4",
        "refused_size-4ranks-cp2+3",
    ),
)
BIND_AND_RESTORE = Contract(
    name="bind and restore",
    promise="the CP group of a micro-batch is bound for one call and put back: A, B, A gives A "
    "twice, bit for bit, also after an exception inside a layer",
    checks=("order",),
    cases=(
        "ragged-4ranks-cp2.4.2",
        "ragged-4ranks-cp2.1.2",
        "ragged-4ranks-cp2.1.2-interrupted",
        "ragged-4ranks-cp4+2_1_1.1.4+2_1_1-interrupted",
    ),
)
POSITIONS = Contract(
    name="positions",
    promise="positions restart in every sequence and follow the zigzag; labels are shifted inside "
    "the sequence before the split",
    checks=("layout", "logits", "logprobs"),
    cases=(
        "ragged-4ranks-cp1",
        "ragged-4ranks-cp2",
        "unpadded-4ranks-cp4",
        "short-4ranks-cp4",
        "ones-6ranks-cp6",
        "longtail-8ranks-cp8",
        "ragged-4ranks-cp4+2_1_1",
        "ragged-4ranks-cp2+1-tp2-sp",
        "ragged-4ranks-cp2+1-pp2",
    ),
)
PADDING = Contract(
    name="padding",
    promise="padding never reaches a real token, a loss or a gradient, whatever it holds: ids of "
    "real tokens, an embedding of 1e4, NaN",
    checks=("logits", "logprobs", "entropy", "loss", "gradients"),
    cases=(
        "poisoned_ids-4ranks-cp2",
        "poisoned_huge-4ranks-cp2",
        "poisoned_nan-4ranks-cp1",
        "poisoned_nan-4ranks-cp2",
        "poisoned_nan-4ranks-cp4",
        "poisoned_nan-8ranks-cp8",
        "poisoned_nan-4ranks-cp4+2+1",
    ),
)
SCALE = Contract(
    name="scale",
    promise="raw gradients, summed over micro-batches and ranks, are those of the unsharded "
    "batch in absolute value, however it is cut and whatever is masked",
    checks=("loss", "gradients"),
    cases=(
        "ragged-4ranks-cp2",
        "ragged-4ranks-cp2-full",
        "ragged-4ranks-cp2-single",
        "ragged-4ranks-cp2-shard",
        "ragged-4ranks-cp2-rank",
        "ragged-4ranks-cp2-none",
        "ragged-4ranks-cp4-t0.7-seqmean",
        "ragged-4ranks-cp4-t2-seqsum",
        "ragged-4ranks-cp4+2+1",
        "ragged-4ranks-cp2.2+2.2+2+2+2+2",
        "ragged-4ranks-cp4+2_1_1",
        "ragged-4ranks-cpbalanced24",
        "ragged-8ranks-cpuniform24",
        "longtail-8ranks-cpmegatron32",
        "ragged-8ranks-cp2+1-tp2-sp-pp2",
        "ragged-4ranks-cp4+2_1_1-distopt",
    ),
)
CP_OFF = Contract(
    name="CP size 1",
    promise="CP size 1 means that CP is off for this call, never the group that Megatron was "
    "initialised with",
    checks=("layout", "logits", "loss", "gradients"),
    cases=(
        "ragged-1ranks-cp1",
        "ragged-4ranks-cp1",
        "ones-4ranks-cp1",
        "ragged-4ranks-cp1.4.2-static2",
    ),
)
CONTRACTS = (GROUPS, BIND_AND_RESTORE, POSITIONS, PADDING, SCALE, CP_OFF)


@dataclass(frozen=True)
class ContractResult:
    """What became of a contract in a run; `docs/report.md` describes it for other tools.

    Args:
        name: of the contract. cases: the verdict of each that was run, by id, in order.
        reason: why the first with the worst verdict is no pass.
    """

    name: str
    promise: str
    cases: Mapping[str, Verdict]
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """The worst of any case."""
        return worst_verdict(self.cases.values()) or Verdict.SKIPPED

    @property
    def first(self) -> str:
        """The first case with that verdict."""
        return next((id for id, verdict in self.cases.items() if verdict is self.verdict), "")


def contract_results(proofs: Iterable[Proof]) -> Iterator[ContractResult]:
    """Proofs by contract; one without any was not asked for."""
    known = list(proofs)
    for contract in CONTRACTS:
        found = {one.case: one for one in known if one.contract == contract.name}
        cases = {id: found[id].verdict for id in contract.cases if id in found}
        if cases:
            result = ContractResult(contract.name, contract.promise, cases)
            reason = found[result.first].reason
            yield ContractResult(contract.name, contract.promise, cases, reason)
