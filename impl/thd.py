"""Jagged tensors of a sub-batch → one packed (THD) row per CP rank, and outputs back again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import gather_replicated
from .layout import RankIndex, rank_index
from .megatron.packed import PackedSeqParams, packed_seq_params
from .pack import jagged, next_token_labels, offsets_of, pack_rows, seqlens_of
from .rules import DEFAULT_RULES, PackRules

NO_LABEL = -100  # where a sequence ends, and in padding


@dataclass(frozen=True, eq=False)
class PackedRow:
    """What a rank hands to the model for one micro-batch.

    Args:
        tensors: [T, ...] by name, padded rows filled.
        params: boundaries and CP group in Megatron's form.
        index: the maps that undo the packing. cp_group: the ranks that share the sequences.
    """

    tensors: Mapping[str, Tensor]
    params: PackedSeqParams
    index: RankIndex
    cp_group: dist.ProcessGroup

    @property
    def position_ids(self) -> Tensor:
        """int64 [T]; 0 at the start of every sequence."""
        return self.index.position_ids


def preprocess_thd_engine(
    tensors: Mapping[str, Tensor],
    *,
    cp_group: dist.ProcessGroup,
    tp_size: int = 1,
    rules: PackRules = DEFAULT_RULES,
    cu_seqlens: str = "padded",
    fill: Mapping[str, float] | None = None,
    labels_of: str | None = None,
    mtp_depth: int = 0,
    seqlens: tuple[int, ...] | None = None,
) -> PackedRow:
    """Pack jagged tensors for this CP rank, each sequence cut by itself.

    Args:
        tensors: jagged [S, L, ...], all of the same lengths.
        cp_group: the micro-batch's group; of size 1 when CP is off.
        tp_size: with sequence parallelism, packs divide by it as well.
        rules: how sequences are cut, and what is padded to what.
        cu_seqlens: offsets that attention is given, "padded" or "real"; see `packed_seq_params`.
        fill: by name, what padded rows hold; 0 where not named.
        labels_of: name of the ids whose next tokens are packed as "labels", shifted inside each
            sequence before the split, `NO_LABEL` where there is none.
        mtp_depth: of the model; "mtp_labels" [T, depth] are packed too, entry k being the token
            k + 2 further.
        seqlens: their lengths, where they are on the host already.
    Raises:
        ValueError: what `rules` ask for cannot be had, or more than this Megatron knows; a name
            that is not there, or "labels" where they are made.
    """
    _check_names(tensors, fill or {}, labels_of)
    values = {name: tensor.values() for name, tensor in tensors.items()}
    if seqlens is None:
        seqlens = seqlens_of(next(iter(tensors.values())))
    fill = {**(fill or {}), "labels": NO_LABEL, "mtp_labels": NO_LABEL}
    if labels_of is not None:
        ahead = [
            next_token_labels(values[labels_of], seqlens, fill=NO_LABEL, ahead=each)
            for each in range(1, mtp_depth + 2)
        ]
        values["labels"] = ahead[0]
        if mtp_depth:
            values["mtp_labels"] = torch.stack(ahead[1:], 1)
    index = rank_index(
        seqlens,
        cp_size=cp_group.size(),
        cp_rank=cp_group.rank(),
        tp_size=tp_size,
        rules=rules,
        device=next(iter(values.values())).device,
    )
    rows = {
        name: pack_rows(flat, index, pad_value=fill.get(name, 0)) for name, flat in values.items()
    }
    params = packed_seq_params(index, cp_group, cu_seqlens=cu_seqlens)
    if mtp_depth:
        params.next_ids = _next_ids(rows)  # for `impl.megatron.mtp`
    return PackedRow(rows, params, index, cp_group)


def _next_ids(rows: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """What every module of multi-token prediction embeds, int64 [T] each; id 0 where none is."""
    labels = torch.cat([rows["labels"].unsqueeze(1), rows["mtp_labels"][:, :-1]], 1)
    return labels.clamp(min=0).unbind(1)


def _check_names(
    tensors: Mapping[str, Tensor], fill: Mapping[str, float], labels_of: str | None
) -> None:
    for tensor in tensors.values():
        offsets_of(tensor)  # refuses what is not jagged
    known = ", ".join(tensors)
    if labels_of is not None and labels_of not in tensors:
        raise ValueError(f"there is no {labels_of} in the batch to make labels of, only {known}")
    for name in ("labels", "mtp_labels"):
        if labels_of is not None and name in tensors:
            raise ValueError(f"{name} are made of {labels_of}; rename the tensor called {name}")
    for name in fill:
        if name not in tensors:
            raise ValueError(f"fill names {name}, which is not in the batch: {known}")


def postprocess_thd_engine(real_rows: Tensor, packed: PackedRow) -> Tensor:
    """This rank's real rows [R, ...] → whole sequences, jagged, on every member of the CP group.

    Every member must go on to compute the same from the result: each keeps the gradient of its
    own rows, so summed over the group every token counts once, with no factor of the CP size.

    Raises:
        ValueError: not as many rows as the pack has real ones.
    """
    index = packed.index
    if len(real_rows) != len(index.real_rows):
        raise ValueError(
            f"an output has {len(real_rows)} rows, the pack {len(index.real_rows)} real ones; a "
            "logits processor returns one for each row it is given"
        )
    if packed.cp_group.size() == 1:
        return jagged(real_rows, index.seqlens)
    missing = index.max_real_rows - len(real_rows)
    level = torch.cat([real_rows, real_rows.new_zeros(missing, *real_rows.shape[1:])])
    gathered = gather_replicated(level, packed.cp_group) if index.max_real_rows else level
    return jagged(gathered.index_select(0, index.token_slots), index.seqlens)
