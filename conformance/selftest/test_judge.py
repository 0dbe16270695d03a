"""Whatever ranks return, the judge answers with findings that name the rank, and never raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.adapters.reference import Rank, oracle
from conformance.build import TaskBuilder
from conformance.case import parse_case
from conformance.judge import judge
from conformance.protocol import Outputs, Pack, RankContext

TASK = TaskBuilder(oracle).task(parse_case("lens5_7_3-2ranks-cp2"))
TRUTH = oracle.evaluate(TASK.model, TASK.weights, TASK.batch, TASK.loss)
GOOD = [Rank(RankContext(rank, 2, 1.0)).run(TASK) for rank in range(2)]
STAGES = TaskBuilder(oracle).task(parse_case("lens7_9-2ranks-cp1-qwen2-pp2"))
TIED = "model.embed_tokens.weight"


def failed(rank: int, change: Callable[[Outputs], dict[str, Any]]) -> dict[str, str]:
    """Where and why, by check, when one rank's outputs are changed."""
    replies = list(GOOD)
    outputs = replies[rank][0]
    replies[rank] = (replace(outputs, **change(outputs)),)
    findings = judge(TASK, replies, oracle, TRUTH)
    return {found.check: found.where or found.reason for found in findings if not found.passed}


def failed_on_stages(*changes: Callable[[Outputs], dict[str, Any]]) -> dict[str, str]:
    """The same of two pipeline stages of one rank each, whose outputs are changed in turn."""
    replies = [Rank(RankContext(rank, 2, 1.0)).run(STAGES) for rank in range(2)]
    truth = oracle.evaluate(STAGES.model, STAGES.weights, STAGES.batch, STAGES.loss)
    changed = [
        (replace(outputs, **change(outputs)),)
        for (outputs,), change in zip(replies, changes, strict=True)
    ]
    findings = judge(STAGES, changed, oracle, truth)
    return {found.check: found.where or found.reason for found in findings if not found.passed}


def change_pack(**fields: Any) -> Callable[[Outputs], dict[str, Any]]:
    return lambda outputs: {"packs": tuple(replace(pack, **fields) for pack in outputs.packs)}


def test_right_outputs_pass() -> None:
    assert failed(0, lambda outputs: {}) == {}


def test_missing_sequence_is_found_on_any_rank() -> None:
    def last_lost(outputs: Outputs) -> dict[str, Any]:
        return {"logits": outputs.logits[:-1]}

    assert failed(0, last_lost).keys() == {"logits", "merge"}
    assert failed(1, last_lost) == {"merge": "logits of sequence 2 on rank 1 is not rank 0's"}


@pytest.mark.parametrize("rank", [0, 1])
def test_gradient_that_one_rank_lacks_is_found(rank: int) -> None:
    def embedding_lost(outputs: Outputs) -> dict[str, Any]:
        name = "model.embed_tokens.weight"
        return {"gradients": {n: g for n, g in outputs.gradients.items() if n != name}}

    said = failed(rank, embedding_lost)["merge"]
    assert said == "gradient of model.embed_tokens.weight on rank 1 is not rank 0's"


@pytest.mark.parametrize("rank", [0, 1])
def test_gradient_of_an_unknown_parameter_is_found(rank: int) -> None:
    def one_more(outputs: Outputs) -> dict[str, Any]:
        return {"gradients": {**outputs.gradients, "extra": torch.zeros(1)}}

    assert failed(rank, one_more)["merge"] == "gradient of extra on rank 1 is not rank 0's"


def test_gradient_of_another_shape_is_named() -> None:
    def first_rows(outputs: Outputs) -> dict[str, Any]:
        return {"gradients": {n: g[:1] for n, g in outputs.gradients.items()}}

    assert "model.embed_tokens.weight has (1, 32), not (64, 32)" in failed(0, first_rows).values()


def test_loss_must_be_one_number() -> None:
    said = failed(0, lambda outputs: {"loss": outputs.loss.expand(2)})
    assert said["loss"] == "it has shape (2,), not that of one number"


def test_wrong_logit_is_named_by_its_entry() -> None:
    def one_entry(outputs: Outputs) -> dict[str, Any]:
        first, *others = outputs.logits
        changed = first.index_put((torch.tensor(3), torch.tensor(41)), torch.tensor(9.0).double())
        return {"logits": (changed, *others)}

    said = failed(0, one_entry)["logits"]
    assert said.startswith("sequence 0, token 3, rank 1 of CP group [0, 1], entry 41: got 9, ")


def test_rounding_to_float32_shows_in_the_numbers() -> None:
    said = failed(0, lambda outputs: {"logits": tuple(t.float() for t in outputs.logits)})
    got, expected = said["logits"].partition("got ")[2].split(", expected ")
    assert float(got) == pytest.approx(float(expected), rel=1e-6)
    assert got != expected


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda outputs: {"packs": ()}, "ran 0 micro-batches of 1"),
        (change_pack(cp_ranks=()), "CP group is ranks [], not [0, 1]"),
        (change_pack(samples=(0, 1, 9)), "9"),
        (change_pack(cu_seqlens_padded=torch.tensor([0])), "cu_seqlens_padded [0] should be"),
    ],
    ids=["no packs", "no group", "unknown sample", "no boundaries"],
)
def test_malformed_pack_fails_the_layout_and_nothing_raises(
    rank: int, change: Callable[[Outputs], dict[str, Any]], words: str
) -> None:
    def wrong(outputs: Outputs) -> dict[str, Any]:
        return {**change(outputs), "logits": tuple(t + 1 for t in outputs.logits)}

    said = failed(rank, wrong)
    assert words in said["layout"]
    assert "merge" in said


def test_pack_of_a_group_without_samples_holds_padding_only() -> None:
    task = TaskBuilder(oracle).task(parse_case("lens5-2ranks-cp1"))
    replies = [Rank(RankContext(rank, 2, 1.0)).run(task) for rank in range(2)]
    truth = oracle.evaluate(task.model, task.weights, task.batch, task.loss)
    assert all(found.passed for found in judge(task, replies, oracle, truth))
    pack: Pack = replies[1][0].packs[0]
    real = replace(pack, tokens=pack.tokens * 0 + 5)
    replies[1] = (replace(replies[1][0], packs=(real,)),)
    layout = judge(task, replies, oracle, truth)[0]
    assert layout.where == "micro-batch 0, rank 1: no samples, but tokens [5]"


def layers(numbers: Sequence[int], *others: str) -> Callable[[Outputs], dict[str, Any]]:
    """Outputs are those of a stage: gradients of some layers, and of other parameters."""
    wanted = (*(f"model.layers.{number}." for number in numbers), *others)

    def change(outputs: Outputs) -> dict[str, Any]:
        return {"gradients": {n: g for n, g in outputs.gradients.items() if n.startswith(wanted)}}

    return change


def without_outputs(outputs: Outputs) -> dict[str, Any]:
    return {"logits": (), "logprobs": (), "entropy": ()}


FIRST, LAST = layers([0], TIED), layers([1], TIED, "model.norm")


def test_stages_have_the_gradients_of_their_own_layers() -> None:
    assert failed_on_stages(FIRST, LAST) == {}
    assert failed_on_stages(without_outputs, LAST) == {}


def test_gradient_that_no_stage_has_is_found() -> None:
    said = failed_on_stages(FIRST, layers([1], TIED))
    assert said == {"gradients": "not the same parameters: model.norm.weight"}


@pytest.mark.parametrize("wrong", [0, 1])
def test_tied_gradient_must_be_right_on_every_stage(wrong: int) -> None:
    def doubled(stage: int, own: Callable[[Outputs], dict[str, Any]]) -> Any:
        def change(outputs: Outputs) -> dict[str, Any]:
            gradients = own(outputs)["gradients"]
            factor = 2 if stage == wrong else 1
            return {"gradients": {**gradients, TIED: gradients[TIED] * factor}}

        return change

    said = failed_on_stages(doubled(0, FIRST), doubled(1, LAST))
    assert said.keys() == {"gradients"}
    assert said["gradients"].startswith(f"{TIED}[")
    assert f"] on stage {wrong}: got " in said["gradients"]


def test_outputs_of_an_earlier_stage_are_those_of_the_last() -> None:
    def one_off(outputs: Outputs) -> dict[str, Any]:
        first, *others = outputs.logprobs
        return {"logits": (), "logprobs": (first, *(each + 1 for each in others))}

    said = failed_on_stages(one_off, lambda outputs: {})
    assert said == {"merge": "logprobs of sequence 1 on rank 0 is not rank 1's"}
