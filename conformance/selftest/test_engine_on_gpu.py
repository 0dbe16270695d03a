"""The engine's steps on GPUs, one for each rank, in float64 against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from conformance.selftest.engine_ranks import Case, run_rank
from conformance.selftest.test_engine import BATCH, BUDGET, MODEL, error_of, expected_of
from impl.parallel import ParallelLayout

NUM_RANKS = 1 << (min(torch.cuda.device_count(), 8).bit_length() - 1)
CASE = Case(
    batch=BATCH,
    micro_batches=None,
    num_dp_cp_ranks=NUM_RANKS,
    model={**MODEL, "qk_norm": True},
    layout=ParallelLayout(recompute=True, distributed_optimizer=True),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    start_processes(run_rank, (str(folder), {"gpu": CASE}, "cuda"), nprocs=NUM_RANKS)
    files = [folder / f"rank_{rank}.pt" for rank in range(NUM_RANKS)]
    return [torch.load(file, map_location="cpu")["gpu"] for file in files]


def test_gradients_and_loss_are_those_of_the_unsharded_batch(results) -> None:
    expected = expected_of(CASE)
    for rank in results:
        assert error_of(rank["loss"], expected.loss) <= BUDGET
        for name, gradient in expected.gradients.items():
            assert error_of(rank["gradients"][name], gradient) <= BUDGET, name


def test_host_waits_for_the_gpu_once_for_the_lengths(results) -> None:
    for rank in results:
        assert [place.partition(":")[0] for place in rank["synchronised"]] == ["split.py"]


def test_outputs_come_in_input_order_on_every_rank(results) -> None:
    expected = expected_of(CASE)
    for rank in results:
        assert error_of(rank["outputs"]["logprobs"], torch.cat(expected.logprobs)) <= BUDGET
        assert error_of(rank["outputs"]["entropy"], torch.cat(expected.entropy)) <= BUDGET
