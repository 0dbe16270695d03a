"""Worlds of rank processes for tests that judge many tasks, one world for each size."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

TIME_LIMIT = 120  # seconds, for all tasks of a world
LIMIT = timedelta(seconds=60)  # of a collective


def found_by_ranks(
    tasks: Mapping[str, Any],
    run_rank: Callable[[int, str, Mapping[str, Any]], None],
    make_folder: Callable[[str], Path],
) -> dict[str, list[Any]]:
    """What each rank found, by task.

    Args:
        tasks: each with a `world_size`.
        run_rank: called in a process of each rank as `run_rank(rank, folder, tasks)`; ends in
            `serve_rank`. Its module is imported once for all.
        make_folder: of a world, by name.
    """
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload([run_rank.__module__])
    found: dict[str, list[Any]] = {}
    for world_size in sorted({task.world_size for task in tasks.values()}):
        mine = {name: task for name, task in tasks.items() if task.world_size == world_size}
        folder = make_folder(f"world_{world_size}")
        ranks = [
            fork.Process(target=run_rank, args=(rank, str(folder), mine), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIME_LIMIT)
            process.kill()
        by_rank = [torch.load(folder / f"rank_{rank}.pt") for rank in range(world_size)]
        found |= {name: [rank[name] for rank in by_rank] for name in mine}
    return found


def serve_rank(
    rank: int,
    folder: str,
    tasks: Mapping[str, Any],
    run: Callable[[Any], Any],
    *,
    backends: str = "gloo",
) -> None:
    """Join the world, run every task, and write what was found to `rank_N.pt`, by task."""
    torch.set_num_threads(1)
    world_size = next(iter(tasks.values())).world_size
    store = FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group(backends, store=store, rank=rank, world_size=world_size, timeout=LIMIT)
    results = {name: run(task) for name, task in tasks.items()}
    torch.save(results, Path(folder) / f"rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
