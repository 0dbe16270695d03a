"""The engine's steps against the oracle: what the suite does not ask of an implementation.

Every road of the gradient scale, outputs of any shape, steps without a backward, plans refused.

Ranks compute, this process judges. One world of processes for each world size runs all its cases.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from reference import ModelConfig
from reference.batch import Batch as OracleBatch
from reference.batch import Loss, Result
from reference.evaluate import evaluate

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from conformance.selftest.engine_ranks import ENTROPY_COEFF, TOP_K, Batch, Case, run_rank
from conformance.selftest.rank_worlds import found_by_ranks
from impl.parallel import ParallelLayout
from impl.scale import Road

BUDGET = 1e-9
pytestmark = pytest.mark.xdist_group("engine")  # its worlds of ranks start once, not per worker

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 24,
    "vocab_size": 48,
}
BATCH = Batch((5, 13, 24, 1, 9, 17, 11, 2, 7, 3))

FOUR = (
    (((0, 1, 2, 3), (2, 5)),),
    (((0, 1), (1,)), ((2,), (6,)), ((3,), (4, 3))),
    (((0,), (0,)), ((1,), (7,)), ((2, 3), (8, 9))),
)
TWO = (
    (((0, 1), (2, 5, 1)),),
    (((0,), (4, 6, 3)), ((1,), (0, 7, 8, 9))),
)
FREE = (
    (((0, 1), (2, 5)), ((2,), (6, 1)), ((3,), (4, 3, 7))),
    (((0,), (0,)), ((1,), (8, 9))),
)
CUT_IN_5 = tuple(
    (((0, 1), first), ((2,), second), ((3,), third))
    for first, second, third in (
        ((2,), (0,), (1,)),
        ((3, 4), (), (5,)),
        ((6,), (7,), ()),
        ((8,), (), ()),
        ((9,), (), ()),
    )
)


def _layout(**sizes: Any) -> dict[str, Any]:
    return {"layout": ParallelLayout(**sizes)}


THREE_VALUES = Road(per_token=False, ddp_averages=True)
TWO_VALUES = Road(num_values=2, per_token=False, ddp_averages=True)
TWO_VALUES_PER_TOKEN = Road(num_values=2)
CASES: dict[str, dict[str, Any]] = {
    "mixed": {},
    "cut_in_5": {"micro_batches": CUT_IN_5},
    "free_running": {"micro_batches": FREE, "barriered": False},
    "planned_by_the_engine": {"micro_batches": None},
    "more_ranks_than_samples": {"micro_batches": None, "batch": Batch((5, 9))},
    "all_masked": {"batch": replace(BATCH, masked="all")},
    "rank_without_valid_tokens": {
        "batch": replace(BATCH, masked="first"),
        "micro_batches": ((((0,), (0,)), ((1,), (1, 2, 3)), ((2, 3), (4, 5, 6, 7, 8, 9))),),
    },
    "sequence_mean": {"aggregation": "sequence-mean-token-mean"},
    "sequence_sum": {"aggregation": "sequence-mean-token-sum"},
    "packs_of_16": {"rules": {"sequence_multiple": 3, "pack_multiple": 16}},
    "buckets-room": {"rules": {"pack_buckets": (24, 64), "max_sequences": 9}},
    "three_values": {"road": THREE_VALUES},
    "three_values-static2": {"road": THREE_VALUES, **_layout(static_cp_size=2)},
    "two_values": {"road": TWO_VALUES},
    "two_values-static2": {"road": TWO_VALUES, **_layout(static_cp_size=2)},
    "two_values-per_token": {"road": TWO_VALUES_PER_TOKEN},
    "two_values-per_token-static2": {"road": TWO_VALUES_PER_TOKEN, **_layout(static_cp_size=2)},
    "two_values-distopt": {"road": TWO_VALUES, **_layout(distributed_optimizer=True)},
    "pp2": {"micro_batches": TWO, "num_dp_cp_ranks": 2, **_layout(pp_size=2)},
}
ALL = {
    name: Case(**{"batch": BATCH, "micro_batches": FOUR, "model": MODEL, **case})
    for name, case in CASES.items()
}
EVERY_CASE = pytest.mark.parametrize("name", ALL)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """Of every case: what each rank found."""
    return found_by_ranks(ALL, run_rank, tmp_path_factory.mktemp)


@functools.cache
def _expected(name: str) -> Result:
    return expected_of(ALL[name])


def expected_of(case: Case) -> Result:
    drawn = case.batch.draw()
    lengths = list(case.batch.seqlens)
    ids, mask, temperature = (
        drawn[key].split(lengths) for key in ("input_ids", "loss_mask", "temperature")
    )
    batch = OracleBatch(ids, mask, tuple(float(each[0]) for each in temperature))
    loss = Loss(case.aggregation, ENTROPY_COEFF)
    return evaluate(ModelConfig(**case.model), case.weights(), batch, loss)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error over the largest expected value."""
    scale = expected.abs().max().clamp(min=1e-300) if expected.any() else 1.0
    return float(((found - expected).abs() / scale).nan_to_num(nan=float("inf")).max())


@EVERY_CASE
def test_gradients_are_those_of_the_unsharded_batch(results, name) -> None:
    expected = _expected(name).gradients
    for rank in results[name]:
        errors = {key: error_of(value, expected[key]) for key, value in rank["gradients"].items()}
        assert {key: error for key, error in errors.items() if error > BUDGET} == {}


@EVERY_CASE
def test_every_weight_has_a_gradient_on_some_stage(results, name) -> None:
    found = {key for rank in results[name] for key in rank["gradients"]}

    assert found == set(_expected(name).gradients)


@EVERY_CASE
def test_loss_is_that_of_the_unsharded_batch_on_every_rank(results, name) -> None:
    expected = _expected(name).loss
    for rank in results[name]:
        assert error_of(rank["loss"], expected) <= BUDGET


@EVERY_CASE
def test_outputs_come_in_input_order_on_the_last_stage(results, name) -> None:
    expected = _expected(name)
    last = [rank["outputs"] for rank in results[name] if rank["outputs"]]

    assert len(last) == ALL[name].world_size // ALL[name].layout.pp_size
    for outputs in last:
        assert error_of(outputs["logprobs"], torch.cat(expected.logprobs)) <= BUDGET
        assert error_of(outputs["entropy"], torch.cat(expected.entropy)) <= BUDGET


@EVERY_CASE
def test_metrics_count_each_group_once(results, name) -> None:
    batch = ALL[name].batch
    mask = batch.draw()["loss_mask"].split(list(batch.seqlens))
    expected = sum(int(each[1:].sum()) for each in mask)
    for rank in results[name]:
        assert rank["metrics"] in ({}, {"valid": expected})


@EVERY_CASE
def test_outputs_have_any_shape_and_type(results, name) -> None:
    logits = torch.cat(_expected(name).logits)
    best = logits.topk(TOP_K)
    for rank in results[name]:
        if rank["outputs"]:
            assert error_of(rank["outputs"]["top_values"], best.values) <= BUDGET
            assert torch.equal(rank["outputs"]["top_ids"], best.indices)


@EVERY_CASE
def test_forward_only_has_the_loss_and_leaves_gradients_alone(results, name) -> None:
    for rank in results[name]:
        assert torch.equal(rank["loss_forward_only"], rank["loss"])
        for key, gradient in rank["gradients_after_forward_only"].items():
            assert torch.equal(gradient, rank["gradients"][key]), key


def test_wholly_masked_batch_has_gradients_of_exactly_zero(results) -> None:
    for rank in results["all_masked"]:
        assert not any(gradient.any() for gradient in rank["gradients"].values())


def test_ranks_run_as_many_packs_as_they_need_where_nothing_forbids_it(results) -> None:
    assert [rank["num_packs"] for rank in results["free_running"]] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("mixed", "lengths", "ValueError: the plan is for lengths [5, 13, 24, 1, 9, 17, 11, 2, 7"),
        ("mixed", "sample", "ValueError: sample 2 is in no micro-batch; add it to a group"),
        ("mixed", "unbarriered", "accepted"),
        ("mixed", "mismatch", "PlanMismatch: rank 1 has plan"),
        ("pp2", "mismatch", "PlanMismatch: rank 1 has plan"),
        ("pp2", "unbarriered", "ValueError: the plan is not barriered, as pp_size above 1 needs"),
    ],
)
def test_plan_that_cannot_be_run_is_refused_on_every_rank(results, name, plan, words) -> None:
    for rank in results[name]:
        assert rank["refused"][plan].startswith(words)


def test_step_without_an_optimizer_says_how_to_get_one(results) -> None:
    for rank in results["mixed"]:
        assert rank["no_optimizer"].startswith("ValueError: there is no optimizer: make the")
