"""The script as a user runs it, in processes of its own, against the reference."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
TIME_LIMIT = 240  # seconds; a run takes about 20 where nothing else does
SMALL = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_heads": 4,
    "model.head_dim": 8,
    "model.ffn_size": 48,
    "batch.tokens": 500,
    "batch.max_seqlen": 160,
    "dynamic_cp.max_seqlen_per_dp_cp_rank": 160,
    "steps": 3,
}
pytestmark = pytest.mark.xdist_group("examples")  # its worlds of ranks not all at once


def _run(ranks: int, *arguments: str, **changes: object) -> tuple[int, str]:
    """Exit status, and what was printed; every process is gone afterwards."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    sets = [f"--set={name}={value}" for name, value in {**SMALL, **changes}.items()]
    process = subprocess.Popen(
        [*launcher, str(TRAIN), *arguments, *sets],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=TIME_LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, printed


TOO_LONG_FOR_ONE = {"dynamic_cp.max_seqlen_per_dp_cp_rank": 80}
RUNS = {  # ranks, largest CP size, changes
    "one process": (1, 1, {}),
    "two ranks": (2, 2, {**TOO_LONG_FOR_ONE, "parallel.distributed_optimizer": False}),
    "two ranks, TP": (2, 1, {"parallel.tp_size": 2}),
}


@pytest.mark.parametrize(("ranks", "cp_size", "changes"), RUNS.values(), ids=RUNS.keys())
def test_training_is_that_of_the_reference(tmp_path, ranks, cp_size, changes) -> None:
    status, printed = _run(ranks, "--reference", **{"out": tmp_path, **changes})

    assert status == 0, printed
    written = json.loads((tmp_path / "losses.json").read_text())
    assert written["losses"] == pytest.approx(written["reference"], rel=1e-9, abs=0)
    assert len(written["losses"]) == 3
    assert max(size for sizes in written["cp_sizes"] for size in sizes) == cp_size
    assert "largest difference from the reference after 3 steps" in printed
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_settings_that_cannot_be_end_it_at_once(tmp_path) -> None:
    status, printed = _run(1, **{"out": tmp_path, "parallel.tp_size": 2})

    assert status == 2
    assert "train.yaml: world_size=1 is not a multiple of tp_size=2" in printed
    assert not list(tmp_path.iterdir())
