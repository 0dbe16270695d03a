"""The pool says which rank went wrong, never hangs, and leaves nothing behind.

Longer than 300 lines: all tests share pools of the same fake implementations, started once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from conformance.pool import RankPool, RankPools, RankReply
from conformance.protocol import Outputs
from conformance.rank_error import RankError
from conformance.selftest.fake_implementations import task
from conformance.wire import decode, encode

FAKE = "conformance.selftest.fake_implementations"
THIS_FILE = "fake_implementations.py:"


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    with RankPools(max_ranks=16, timeout_s=30) as pools:
        yield pools


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.pool(FAKE, 4)


def outputs(reply: RankReply) -> Outputs:
    assert reply.error is None, reply.error
    assert reply.outputs is not None
    return reply.outputs[0]


def losses(replies: list[RankReply]) -> list[float]:
    return [outputs(reply).loss.item() for reply in replies]


def errors(replies: list[RankReply]) -> list[RankError]:
    assert all(reply.outputs is None for reply in replies)
    return [reply.error for reply in replies if reply.error is not None]


def kinds(replies: list[RankReply]) -> list[str]:
    return [reply.error.kind if reply.error else "" for reply in replies]


def running(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def server_of(pool: RankPool) -> tuple[int, Path]:
    """Process id and folder of the fork server behind a pool."""
    assert pool._server.pid is not None
    return pool._server.pid, Path(pool._server._directory)


def wait_until(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.02)


# Ranks at work


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_of_every_world_size_form_one_group(pools: RankPools, world_size: int) -> None:
    replies = pools.pool(FAKE, world_size).run(task("add up"))
    assert losses(replies) == [world_size * (world_size + 1) / 2] * world_size


def test_replies_come_in_rank_order(pool: RankPool) -> None:
    replies = pool.run(task("alone"))
    assert [reply.rank for reply in replies] == [0, 1, 2, 3]
    assert losses(replies) == [0, 1, 2, 3]


def test_processes_are_kept_from_task_to_task(pool: RankPool) -> None:
    pool.run(task("add up"))
    before = pool.pids
    pool.run(task("add up"))
    assert len(set(before)) == 4
    assert pool.pids == before


def test_one_rank_can_run_alone(pool: RankPool) -> None:
    (reply,) = pool.run(task("alone"), only_rank=2)
    assert reply.rank == 2
    assert losses([reply]) == [2]


def test_every_pass_has_its_outputs(pool: RankPool) -> None:
    assert [len(r.outputs or ()) for r in pool.run(task("alone", passes=3))] == [3] * 4


def test_a_task_starts_from_the_same_random_state(pool: RankPool) -> None:
    assert losses(pool.run(task("draw"))) == losses(pool.run(task("draw")))


def test_tensors_larger_than_a_pipe_arrive_unchanged(pool: RankPool) -> None:
    weight = torch.randn(1_000_000, dtype=torch.float64)
    replies = pool.run(task("add up", weights={"weight": weight}))
    assert torch.equal(outputs(replies[3]).gradients["weight"], weight)


def test_modules_are_imported_before_ranks_are_forked(pool: RankPool) -> None:
    assert losses(pool.run(task("say preloaded"))) == [1, 1, 1, 1]


def test_equal_outputs_are_transferred_once(pool: RankPool) -> None:
    first, *others = pool.run(task("add up"))
    assert [outputs(reply).loss is outputs(first).loss for reply in others] == [True] * 3


def test_the_outputs_of_a_rank_that_differs_are_kept(pool: RankPool) -> None:
    assert losses(pool.run(task("odd one out"))) == [1, 1, 7, 1]


def test_every_rank_keeps_its_own_packs(pool: RankPool) -> None:
    replies = pool.run(task("add up"))
    assert [outputs(reply).packs[0].cp_ranks for reply in replies] == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(True),
        torch.tensor([], dtype=torch.int32),
        torch.arange(6).reshape(2, 3).T,
        torch.arange(6)[::2],
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.float64, requires_grad=True),
    ],
    ids=["0-d bool", "empty", "transposed", "strided", "bf16", "requires_grad"],
)
def test_a_tensor_travels_unchanged_and_without_its_graph(tensor: torch.Tensor) -> None:
    arrived = decode(encode(tensor))
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived, tensor)
    assert not arrived.requires_grad


# What an implementation raises


def test_a_value_error_is_a_refusal(pool: RankPool) -> None:
    found = errors(pool.run(task("refuse")))
    assert [(e.kind, e.type, e.message) for e in found] == [
        ("refused", "ValueError", "the batch is empty")
    ] * 4


def test_unsupported_is_told_from_a_failure(pool: RankPool) -> None:
    found = errors(pool.run(task("not supported")))
    assert [(e.kind, e.message) for e in found] == [
        ("unsupported", "no packed sequences here")
    ] * 4


def test_an_exception_is_reported_with_its_place(pool: RankPool) -> None:
    found = errors(pool.run(task("raise everywhere")))
    assert [(e.kind, e.message) for e in found] == [("raised", f"boom on {r}") for r in range(4)]
    assert THIS_FILE in found[0].where
    assert "_raise_everywhere" in found[0].where
    assert "RuntimeError: boom on 0" in found[0].traceback


def test_what_is_no_outputs_is_an_error(pool: RankPool) -> None:
    message = "run returned ('outputs',), not a tuple of Outputs"
    assert [e.message for e in errors(pool.run(task("return nonsense")))] == [message] * 4


def test_ranks_that_only_raised_are_kept(pool: RankPool) -> None:
    pool.run(task("add up"))
    before = pool.pids
    started = time.monotonic()
    for _ in range(10):
        pool.run(task("raise everywhere"))
    assert time.monotonic() - started < 3
    assert losses(pool.run(task("add up"))) == [10] * 4
    assert pool.pids == before


def test_ranks_left_out_of_step_are_replaced(pool: RankPool) -> None:
    assert kinds(pool.run(task("raise after sending"))) == ["raised"] * 4
    assert pool.pids == ()
    assert losses(pool.run(task("add up"))) == [10] * 4


# Ranks that hang or die


def test_a_rank_that_raises_is_blamed_for_those_that_wait(pool: RankPool) -> None:
    replies = pool.run(task("raise on 1"))
    assert kinds(replies) == ["timeout", "raised", "timeout", "timeout"]
    waiting = errors(replies)[0]
    assert waiting.collective == "all_reduce"
    assert waiting.message.startswith("waits in all_reduce at ")
    assert waiting.message.endswith(" for rank 1, which raised RuntimeError: boom")
    assert "in _sum_over_ranks" in waiting.stack
    assert losses(pool.run(task("add up"))) == [10] * 4


def test_a_rank_that_sleeps_is_named_by_those_that_wait(pool: RankPool) -> None:
    replies = pool.run(task("sleep on 1"), timeout_s=1)
    assert kinds(replies) == ["timeout"] * 4
    first, sleeper, *_ = errors(replies)
    assert first.message.startswith("no answer within 1 s: waits in all_reduce at ")
    assert first.message.endswith(" for rank 1, which is in no collective")
    assert sleeper.message.startswith("no answer within 1 s: it is at ")
    assert "_sleep_on_1" in sleeper.where
    assert losses(pool.run(task("add up"))) == [10] * 4


def test_a_rank_that_leaves_early_is_named_by_those_that_wait(pool: RankPool) -> None:
    replies = pool.run(task("return early on 1"), timeout_s=1)
    assert kinds(replies) == ["timeout", "", "timeout", "timeout"]
    assert errors(replies[:1])[0].message.endswith(" for rank 1, which has finished")
    assert losses(replies[1:2]) == [1]


def test_a_wait_for_work_counts_as_a_collective(pools: RankPools) -> None:
    replies = pools.pool(FAKE, 2).run(task("wait for work on 0"), timeout_s=1)
    assert [e.collective for e in errors(replies)] == ["wait", ""]


@pytest.mark.parametrize(
    ("behaviour", "reason", "printed"),
    [
        ("die on 1", "its process was ended by SIGKILL", "last words"),
        ("exit on 1", "its process exited with status 3", ""),
    ],
)
def test_a_rank_that_dies_is_blamed(
    pool: RankPool, behaviour: str, reason: str, printed: str
) -> None:
    replies = pool.run(task(behaviour))
    assert kinds(replies) == ["timeout", "died", "timeout", "timeout"]
    waiting, dead, *_ = errors(replies)
    assert (dead.message, dead.traceback) == (reason, printed)
    assert f" for rank 1, which died: {reason}" in waiting.message
    assert losses(pool.run(task("add up"))) == [10] * 4


def test_ranks_killed_between_tasks_are_reported_and_replaced(pool: RankPool) -> None:
    pool.run(task("add up"))
    os.kill(pool.pids[3], signal.SIGKILL)
    assert kinds(pool.run(task("alone")))[3] == "died"
    assert losses(pool.run(task("add up"))) == [10] * 4


def test_a_stopped_rank_cannot_block_the_sending_of_a_task(pools: RankPools) -> None:
    pool = pools.pool(FAKE, 2)
    pool.run(task("add up"))
    os.kill(pool.pids[0], signal.SIGSTOP)
    weights = {"weight": torch.zeros(1_000_000)}
    assert kinds(pool.run(task("alone", weights=weights), timeout_s=1))[0] == "timeout"


def test_a_dead_fork_server_is_replaced(pools: RankPools) -> None:
    pool = pools.pool(FAKE, 2)
    pool.run(task("alone"))
    before = pool.pids
    os.kill(server_of(pool)[0], signal.SIGKILL)
    assert kinds(pool.run(task("sleep on 1"), timeout_s=1)) == ["timeout", "timeout"]
    assert losses(pool.run(task("alone"))) == [0, 1]
    wait_until(lambda: not any(running(pid) for pid in before))


# State that a task leaves behind


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("leak dtype", "torch default dtype torch.float32 -> torch.float64"),
        ("leak grad mode and raise", "grad mode True -> False (after RuntimeError: boom)"),
        ("leak a function mode", "function modes 0 -> 1"),
        (
            "patch tensor",
            "torch.Tensor.float builtins.TensorBase.float -> builtins.TensorBase.double",
        ),
        (
            "patch a class",
            f"{FAKE}.Watched.forward {FAKE}.Watched.forward -> "
            f"{FAKE}._patch_class.<locals>.<lambda>",
        ),
    ],
)
def test_state_that_a_task_leaves_changed_is_an_error(
    pools: RankPools, behaviour: str, message: str
) -> None:
    pool = pools.pool(FAKE, 1)
    (error,) = errors(pool.run(task(behaviour)))
    assert (error.kind, error.type, error.message) == ("raised", "StateLeak", message)
    assert losses(pool.run(task("draw"))) == losses(pools.pool(FAKE, 2).run(task("draw")))[:1]


def test_state_that_is_put_back_is_no_error(pools: RankPools) -> None:
    assert losses(pools.pool(FAKE, 1).run(task("patch and restore"))) == [0]


# Opening


def test_ranks_that_all_fail_to_open_say_so_for_every_task(pools: RankPools) -> None:
    pool = pools.pool(FAKE, 2, options={"open": "fails"})
    for _ in range(2):
        found = errors(pool.run(task("alone")))
        assert [(e.kind, e.message) for e in found] == [("unsupported", "no such version")] * 2
    assert len(pool.pids) == 2


def test_implementation_of_index_logic_alone_is_unsupported(pools: RankPools) -> None:
    (error,) = errors(pools.pool("conformance.adapters.impl_index", 1).run(task("alone")))
    assert error.kind == "unsupported"
    assert "conformance.adapters.impl_index offers no open_rank: it runs no" in error.message


def test_one_rank_that_fails_to_open_is_blamed(pools: RankPools) -> None:
    replies = pools.pool(FAKE, 2, options={"open": "fails on 1"}).run(task("alone"))
    assert kinds(replies) == ["timeout", "raised"]
    assert "for rank 1, which raised RuntimeError: no luck" in errors(replies)[0].message


def test_one_rank_that_dies_at_opening_is_blamed(pools: RankPools) -> None:
    replies = pools.pool(FAKE, 2, options={"open": "dies on 1"}).run(task("alone"))
    assert kinds(replies) == ["timeout", "died"]
    assert errors(replies)[1].message == "its process exited with status 4"


# Nothing stays


def test_close_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    pool = RankPool(FAKE, 2, options={"closed": str(closed)})
    pool.run(task("add up"))
    server, folder = server_of(pool)
    processes = [*pool.pids, server]
    assert all(running(pid) for pid in processes)
    assert folder.exists()
    pool.close()
    pool.close()
    assert [running(pid) for pid in processes] == [False] * 3
    assert not folder.exists()
    assert sorted(closed.read_text().split()) == ["0", "1"]


def test_a_closed_pool_says_so() -> None:
    pool = RankPool(FAKE, 1)
    pool.close()
    with pytest.raises(RuntimeError, match=r"is closed; make a new one"):
        pool.run(task("alone"))


def test_a_pool_is_made_once_for_the_same_options(pools: RankPools) -> None:
    assert pools.pool(FAKE, 1) is pools.pool(FAKE, 1)
    assert pools.pool(FAKE, 1, options={"a": "b"}) is not pools.pool(FAKE, 1)


def test_the_pool_used_longest_ago_makes_room(pools: RankPools) -> None:
    one, two = pools.pool(FAKE, 1), pools.pool(FAKE, 2)
    two.run(task("alone"))
    pools.pool(FAKE, 1).run(task("alone"))
    pools.pool(FAKE, 14)  # 16 ranks at most, so one of the two has to go
    assert len(one.pids) == 1
    assert two.pids == ()


_HANGING_SUITE = f"""
from conformance.pool import RankPool
from conformance.selftest.fake_implementations import task
pool = RankPool("{FAKE}", 2)
pool.run(task("add up"))
print(*pool.pids, pool._server.pid, pool._server._directory, flush=True)
pool.run(task("sleep on 1"))
"""


def hanging_suite() -> tuple[subprocess.Popen[str], list[int], Path]:
    """A suite in a process of its own, which tells its processes and its folder."""
    suite = subprocess.Popen(
        [sys.executable, "-c", _HANGING_SUITE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    assert suite.stdout is not None
    with suite.stdout:
        *pids, folder = suite.stdout.readline().split()
    assert len(pids) == 3
    return suite, [int(pid) for pid in pids], Path(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_of_an_interrupted_suite(number: int) -> None:
    suite, pids, folder = hanging_suite()
    os.killpg(suite.pid, number)  # as a terminal sends Ctrl-C
    assert suite.wait(10) == -number
    wait_until(lambda: not any(running(pid) for pid in pids) and not folder.exists())
