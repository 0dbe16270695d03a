"""Documents of `fixtures/texts`, a batch for every step: the same on every rank."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from impl.loss import prediction_weights
from impl.pack import jagged

from .settings import BatchSettings

CHECKOUT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Document:
    """Args: ids: int64 [L]. mask: bool [L], whether a token counts as a target."""

    ids: Tensor
    mask: Tensor


Documents = tuple[Document, ...]


def read_documents(settings: BatchSettings, *, vocab_size: int) -> list[Document]:
    """All documents of a file, cut to `max_seqlen`.

    Args:
        settings: a relative path counts from the root of the checkout.
    Raises:
        ValueError: no such file, a line of another kind, or ids outside the vocabulary.
    """
    path = CHECKOUT / settings.texts
    if not path.is_file():
        raise ValueError(f"batch: texts={settings.texts}: there is no file {path}")
    lines = path.read_text(encoding="utf-8").splitlines()
    documents = [
        _document(line, settings.max_seqlen, where=f"{settings.texts}, line {number}")
        for number, line in enumerate(lines, start=1)
    ]
    largest = max(int(document.ids.max()) for document in documents)
    if largest >= vocab_size:
        raise ValueError(
            f"model: vocab_size={vocab_size} is too small: {path.name} has id {largest}"
        )
    return documents


def _document(line: str, max_seqlen: int, *, where: str) -> Document:
    values = json.loads(line)
    try:
        ids, mask = values["input_ids"][:max_seqlen], values["loss_mask"][:max_seqlen]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where}: no input_ids and loss_mask in {line[:60]!r}") from error
    if not ids or len(ids) != len(mask):
        raise ValueError(f"{where}: {len(ids)} input_ids and {len(mask)} entries of loss_mask")
    return Document(torch.tensor(ids), torch.tensor(mask, dtype=torch.bool))


def batches(documents: list[Document], *, tokens: int, seed: int) -> Iterator[Documents]:
    """Batches of up to `tokens` tokens without end, in a new order each time round."""
    shuffle = torch.Generator().manual_seed(seed)
    batch: list[Document] = []
    for _ in itertools.count():
        for index in torch.randperm(len(documents), generator=shuffle).tolist():
            document = documents[index]
            if batch and sum(len(one.ids) for one in batch) + len(document.ids) > tokens:
                yield tuple(batch)
                batch = []
            batch.append(document)


def as_tensors(batch: Documents, device: torch.device) -> dict[str, Tensor]:
    """What the engine takes: jagged [S, L] tensors of the whole batch, by name.

    `weights` makes its loss the mean over the targets of the batch, however it is cut.
    """
    seqlens = tuple(len(document.ids) for document in batch)
    mask = jagged(torch.cat([document.mask for document in batch]), seqlens)
    weights = prediction_weights(mask, aggregation="token-mean")
    tensors = {
        "input_ids": torch.cat([document.ids for document in batch]),
        "weights": weights,
        "temperature": torch.ones_like(weights),
    }
    return {name: jagged(tensor.to(device), seqlens) for name, tensor in tensors.items()}
