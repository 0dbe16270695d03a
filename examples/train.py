"""Train a small language model with dynamic CP and, if asked, check every step of it.

    torchrun --nproc-per-node 4 examples/train.py               # dynamic CP on four ranks
    torchrun --nproc-per-node 4 examples/train.py --reference   # and once more without any
    python examples/train.py                                    # one process

`train.yaml` has the settings; docs/training.md goes through them, and through this file.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")  # what they deprecate or miss
warnings.filterwarnings("ignore", category=SyntaxWarning)  # in the docstrings of Megatron
for name in ("megatron", "torch"):
    logging.getLogger(name).setLevel(logging.ERROR)

from examples.data import Document, as_tensors, batches, read_documents
from examples.history import History, compare, in_words, save
from examples.progress import progress
from examples.reference_run import train_reference
from examples.settings import Settings, read_settings
from impl.engine import Engine, open_parallel_state
from impl.loss import weighted_sum
from impl.megatron.probe import UnsupportedMegatron
from impl.megatron.training import tensor_parallel_group
from impl.plan import Plan
from impl.vocab_parallel import vocab_parallel_logprobs
from reference import random_weights

RANK = int(os.environ.get("RANK", "0"))  # torchrun says so
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: done; 1: the reference differs; 2: settings that cannot be."""
    options = _parse(arguments)
    console = Console(stderr=True, quiet=RANK != 0)
    try:
        settings = read_settings(options.config, options.set)
        settings.check_ranks(WORLD_SIZE)
        documents = read_documents(settings.batch, vocab_size=settings.model.vocab_size)
    except (ValueError, OSError, UnsupportedMegatron) as error:
        said = f"{options.config}: {error}"
        console.print(said, style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    with joined_ranks() as device:
        history = train(settings, documents, device, console)
    if RANK != 0:
        return 0
    reference = run_reference(settings, documents, console) if options.reference else None
    save(settings.out, history, reference, ranks=WORLD_SIZE)
    console.print(f"losses and their plot are in {settings.out}/")
    return 0 if reference is None else compare(history, reference, console)


@contextmanager
def joined_ranks() -> Iterator[torch.device]:
    """The process group of all ranks that torchrun started, or of this process alone.

    The one place that chooses where to compute, in float64 either way: on a GPU for each rank
    where the host has as many, else on the CPU.

    Yields:
        the device of this rank.
    """
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if WORLD_SIZE > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def train(
    settings: Settings, documents: list[Document], device: torch.device, console: Console
) -> History:
    """All steps with dynamic CP; called on every rank, equal on every rank."""
    history = History()
    dynamic_cp, layout = settings.dynamic_cp, settings.parallel
    with open_parallel_state(dynamic_cp, layout, device=device) as state:
        engine = Engine(
            state,
            model=settings.model,
            weights=first_weights(settings),
            optimizer={"optimizer": "adam", **asdict(settings.optimizer)},
        )
        with progress(console, "dynamic CP", settings.steps) as advance:
            for batch in steps(settings, documents):
                plan = state.plan(tuple(len(document.ids) for document in batch))
                result = engine.forward_backward_batch(
                    as_tensors(batch, device), loss, plan=plan, logits_processor=logprobs
                )
                engine.optimizer_step()
                history.losses.append(float(result.loss))
                history.cp_sizes.append(cp_sizes(plan))
                advance(history.losses[-1], sum(plan.seqlens), in_words(history.cp_sizes[-1]))
        history.weights = gathered(engine.weights())
    return history


def logprobs(
    logits: Tensor, labels: Tensor, *, weights: Tensor, temperature: Tensor
) -> dict[str, Tensor]:
    """Of a pack, padding left out: from logits to what the loss needs. See `Engine`."""
    tp_group = tensor_parallel_group()  # each of its ranks has a part of the vocabulary
    return {
        "logprobs": vocab_parallel_logprobs(
            logits, labels, temperature=temperature, tp_group=tp_group
        )
    }


def loss(
    outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Of some sequences: their part of the loss of the batch, and no metrics."""
    return weighted_sum(-outputs["logprobs"].values(), inputs["weights"].values()), {}


def run_reference(settings: Settings, documents: list[Document], console: Console) -> History:
    """The same steps in one process, by definition."""
    history = History()
    batches_of_run = list(steps(settings, documents))
    after_steps = train_reference(
        settings.oracle_model, first_weights(settings), settings.optimizer, batches_of_run
    )
    with progress(console, "reference", settings.steps) as advance:
        for batch, (loss_of_step, weights) in zip(batches_of_run, after_steps, strict=True):
            history.losses.append(loss_of_step)
            history.weights = [weights]
            advance(loss_of_step, sum(len(document.ids) for document in batch), "one process")
    return history


def steps(settings: Settings, documents: list[Document]) -> Iterator[tuple[Document, ...]]:
    """The batch of each step, equal on every rank and in every run."""
    endless = batches(documents, tokens=settings.batch.tokens, seed=settings.seed)
    return islice(endless, settings.steps)


def first_weights(settings: Settings) -> dict[str, Tensor]:
    return random_weights(settings.oracle_model, seed=settings.seed, std=0.02)


def gathered(weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What every rank has, on rank 0; elsewhere nothing."""
    of_ranks = [weights] * WORLD_SIZE
    here = {name: weight.cpu() for name, weight in weights.items()}
    dist.gather_object(here, of_ranks if RANK == 0 else None)
    return of_ranks if RANK == 0 else []


def cp_sizes(plan: Plan) -> list[int]:
    return [group.cp_size for one in plan.micro_batches for group in one.groups]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--config", type=Path, default=here / "train.yaml", metavar="YAML")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="instead of YAML"
    )
    parser.add_argument(
        "--reference", action="store_true", help="train without dynamic CP too, and compare"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
