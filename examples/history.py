"""What a run leaves behind, how it is drawn, and how far two runs are apart."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

TOLERANCE = 1e-7  # of a loss or weight against the reference, relative to the largest


@dataclass
class History:
    """What a run leaves behind.

    Args:
        losses, cp_sizes: of each step; one CP size for each group of its plan.
        weights: after the last step, by Hugging Face name, as each rank has them. With pipeline
            stages a rank has those of its own layers.
    """

    losses: list[float] = field(default_factory=list)
    cp_sizes: list[list[int]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def compare(history: History, reference: History, console: Console) -> int:
    """Say how far the runs are apart. Exit status 1 if further than `TOLERANCE`."""
    losses, expected = torch.tensor([history.losses, reference.losses], dtype=torch.float64)
    of_losses = relative(losses, expected)
    found = {name for weights in history.weights for name in weights}
    assert found == set(reference.weights[0]), "a weight is on no rank"
    of_weights = max(
        (relative(weight, reference.weights[0][name]), name)
        for weights in history.weights
        for name, weight in weights.items()
    )
    console.print(
        f"largest difference from the reference after {len(history.losses)} steps, relative to "
        f"the largest value: losses {of_losses:.1e}, parameters {of_weights[0]:.1e} "
        f"({of_weights[1]})",
        soft_wrap=True,
        highlight=False,
    )
    if max(of_losses, of_weights[0]) <= TOLERANCE:
        return 0
    console.print(f"that is more than {TOLERANCE:.0e}: the two differ", style="red")
    return 1


def save(folder: Path, history: History, reference: History | None, *, ranks: int) -> None:
    """Write `losses.json` and `loss.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, Any] = {
        "losses": history.losses,
        "cp_sizes": history.cp_sizes,
        "ranks": ranks,
    }
    if reference is not None:
        written["reference"] = reference.losses
    (folder / "losses.json").write_text(json.dumps(written) + "\n", encoding="utf-8")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(history.losses, label=f"dynamic CP, {ranks} ranks")
    if reference is not None:
        axes.plot(reference.losses, "--", label="reference, one process")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=150)


def in_words(sizes: list[int]) -> str:
    """How many groups of each CP size.

    >>> in_words([2, 1, 1])
    'CP 2×1 1×2'
    """
    counts = sorted(Counter(sizes).items(), reverse=True)
    return "CP " + " ".join(f"{size}×{count}" for size, count in counts)


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value; infinite if one is not a number."""
    difference = (found - expected).abs().nan_to_num(nan=float("inf")).max()
    return float(difference / expected.abs().max())
