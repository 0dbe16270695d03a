"""The index logic of the production implementation behind the protocol, without Megatron."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl import layout, merge, pack, plan, schedule


class Index:
    """Split, pack and merge without Megatron."""

    def choose_local_cp_size(
        self, seqlens: Sequence[int], *, world_size: int, max_seqlen_per_dp_cp_rank: int
    ) -> int:
        return schedule.choose_local_cp_size(
            seqlens, world_size=world_size, max_seqlen_per_dp_cp_rank=max_seqlen_per_dp_cp_rank
        )

    def split(self, seqlens: Sequence[int], *, world_size: int, cp_size: int) -> list[list[int]]:
        return schedule.split_samples(seqlens, world_size=world_size, cp_size=cp_size)

    def pack(
        self,
        sequences: Sequence[Tensor],
        *,
        cp_size: int,
        cp_rank: int,
        tp_size: int,
        pad_value: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        seqlens = tuple(len(sequence) for sequence in sequences)
        schedule.check_seqlens(seqlens)
        index = layout.rank_index(seqlens, cp_size=cp_size, cp_rank=cp_rank, tp_size=tp_size)
        rows = pack.pack_rows(torch.cat(list(sequences)), index, pad_value=pad_value)
        return rows, index.position_ids, index.cu_seqlens_padded

    def unpack(
        self, shards: Sequence[Tensor], seqlens: Sequence[int], *, cp_size: int, tp_size: int
    ) -> list[Tensor]:
        indices = [
            layout.rank_index(tuple(seqlens), cp_size=cp_size, cp_rank=rank, tp_size=tp_size)
            for rank in range(cp_size)
        ]
        real = [pack.drop_padding(*pair) for pair in zip(shards, indices, strict=True)]
        level = torch.nn.utils.rnn.pad_sequence(real, batch_first=True).flatten(0, 1)
        return list(level.index_select(0, indices[0].token_slots).split(list(seqlens)))

    def labels(self, sequence: Tensor) -> Tensor:
        return pack.next_token_labels(sequence, (len(sequence),), fill=-100)

    def merge(
        self, outputs: Sequence[Sequence[Tensor]], samples: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        by_sample = {
            sample: output
            for group, group_outputs in zip(samples, outputs, strict=True)
            for sample, output in zip(group, group_outputs, strict=True)
        }
        seqlens = [len(by_sample[sample]) for sample in range(len(by_sample))]
        groups = tuple(plan.GroupPlan((rank,), tuple(held)) for rank, held in enumerate(samples))
        micro_batches = (plan.MicroBatchPlan(groups),)
        slots, share = merge.merge_slots(
            plan.Plan(len(groups), tuple(seqlens), micro_batches, "by hand", barriered=True)
        )
        like = by_sample[0]
        gathered = like.new_zeros((len(samples), share, *like.shape[1:]))
        for rows, group_outputs in zip(gathered, outputs, strict=True):
            values = torch.cat([like[:0], *group_outputs])
            rows[: len(values)] = values
        return list(gathered.flatten(0, 1).index_select(0, slots).split(seqlens))


index = Index()
