"""What Megatron is told of a pack, and that a model of it computes the same under every rule."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from impl.layout import rank_index
from impl.pack import drop_padding, jagged, seqlens_of
from impl.rules import PackRules

pytestmark = pytest.mark.usefixtures("megatron")

SEQLENS = (5, 1)
RULES = {
    "sequence4": PackRules(sequence_multiple=4),
    "pack16": PackRules(pack_multiple=16),
    "buckets": PackRules(pack_buckets=(4, 40)),
    "room": PackRules(max_sequences=9),
    "pack16_and_room": PackRules(pack_multiple=16, max_sequences=9),
    "contiguous": PackRules(layout="contiguous", pack_multiple=16),  # at CP size 1 they are one
}


def _group(size: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: 0)


def _params(*, cp_size: int = 2, rules: PackRules | None = None, **keywords: str) -> Any:
    from impl.megatron.packed import packed_seq_params

    index = rank_index(SEQLENS, cp_size=cp_size, cp_rank=0, rules=rules or PackRules())
    return packed_seq_params(index, _group(cp_size), **keywords)


def _has_pad_between_seqs(monkeypatch, value: bool) -> None:
    from impl.megatron.probe import features

    known = dataclasses.replace(features(), pad_between_seqs=value, version="1.2.3")
    monkeypatch.setattr("impl.megatron.packed.features", lambda: known)


def test_padded_offsets_are_one_object() -> None:
    params = _params()

    assert params.cu_seqlens_q.tolist() == [0, 8, 12]
    assert params.cu_seqlens_q is params.cu_seqlens_kv
    assert params.cu_seqlens_q is params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded
    assert getattr(params, "pad_between_seqs", None) is None


def test_real_offsets_stand_beside_padded_ones(monkeypatch) -> None:
    _has_pad_between_seqs(monkeypatch, True)
    params = _params(cu_seqlens="real")

    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 5, 6]
    assert params.cu_seqlens_q_padded.tolist() == [0, 8, 12]
    assert params.cu_seqlens_kv_padded.tolist() == [0, 8, 12]
    assert params.pad_between_seqs is True


def test_longest_counts_padding_and_the_sequence_that_is_all_padding() -> None:
    assert _params().max_seqlen_q == _params().max_seqlen_kv == 8
    assert _params(rules=PackRules(pack_multiple=16)).max_seqlen_q == 20
    assert _params(rules=PackRules(max_sequences=9)).max_seqlen_q == 8


def test_real_offsets_are_unsupported_where_megatron_has_no_field(monkeypatch) -> None:
    from impl.megatron.probe import UnsupportedMegatron

    _has_pad_between_seqs(monkeypatch, False)
    words = (
        "megatron-core 1.2.3: PackedSeqParams has no pad_between_seqs, so attention would guess "
        "where padding is; 0.19.2 has it; use cu_seqlens='padded'"
    )
    with pytest.raises(UnsupportedMegatron, match=f"^{re.escape(words)}$"):
        _params(cu_seqlens="real")


def test_feature_is_what_the_dataclass_declares() -> None:
    from impl.megatron.packed import PackedSeqParams
    from impl.megatron.probe import features

    declared = {field.name for field in dataclasses.fields(PackedSeqParams)}
    assert features().pad_between_seqs == ("pad_between_seqs" in declared)


def test_unknown_offsets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens='both' is not one of padded, real$"):
        _params(cu_seqlens="both")


def test_contiguous_layout_is_refused_where_it_differs_from_the_zigzag() -> None:
    words = (
        "layout='contiguous' at CP size 2: Megatron's RoPE and attention take rank r to hold "
        "chunks r and 2 * cp_size - 1 - r of every sequence and cannot be given positions; "
        "use layout='zigzag'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        _params(rules=PackRules(layout="contiguous"))

    assert _params(cp_size=1, rules=PackRules(layout="contiguous")).max_seqlen_q == 5


def _model() -> Any:
    from impl.megatron.model import GPTConfig, build_gpt_model

    config = GPTConfig(
        num_layers=2,
        hidden_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=40,
        vocab_size=53,
    )
    model = build_gpt_model(config, max_seqlen=64)
    draw = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data = 0.15 * torch.randn(weight.shape, dtype=weight.dtype, generator=draw)
    return model


def _logits(model: Any, seqlens: tuple[int, ...], **asked: Any) -> Tensor:
    """Of every real token, float64 [N, V]."""
    from impl.thd import postprocess_thd_engine, preprocess_thd_engine

    ids = jagged(torch.arange(sum(seqlens)) * 7 % 53, seqlens)
    group = dist.group.WORLD
    assert group is not None
    packed = preprocess_thd_engine({"input_ids": ids}, cp_group=group, **asked)
    row, positions = packed.tensors["input_ids"][None], packed.position_ids[None]
    logits = model(row, positions, None, packed_seq_params=packed.params)[0]
    whole = postprocess_thd_engine(drop_padding(logits, packed.index), packed)
    assert seqlens_of(whole) == seqlens
    return whole.values()


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("seqlens", [(5, 1), (9,), (3, 8, 6)], ids=str)
def test_model_computes_the_same_under_every_rule(seqlens, rules) -> None:
    model = _model()
    expected, got = _logits(model, seqlens), _logits(model, seqlens, rules=rules)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    expected.square().sum().backward()
    truth = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    got.square().sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, truth[name], rtol=1e-11, atol=1e-11)


def test_model_runs_a_pack_without_sequences() -> None:
    rules = PackRules(pack_multiple=16, max_sequences=3)
    assert _logits(_model(), (), rules=rules).shape == (0, 53)


def test_model_computes_the_same_with_real_offsets() -> None:
    from impl.megatron.probe import features

    if not features().pad_between_seqs:
        pytest.skip(f"megatron-core {features().version} has no PackedSeqParams.pad_between_seqs")
    model, rules = _model(), PackRules(sequence_multiple=4, pack_multiple=16)
    got = _logits(model, (5, 1), rules=rules, cu_seqlens="real")
    torch.testing.assert_close(got, _logits(model, (5, 1)), rtol=1e-12, atol=1e-12)


def test_model_refuses_what_its_pack_cannot_have() -> None:
    words = "a pack of 2 sequences is above max_sequences=1; raise it or pack fewer"
    with pytest.raises(ValueError, match=f"^{words}$"):
        _logits(_model(), (5, 1), rules=PackRules(max_sequences=1))


def _pack(**tensors: Any) -> Any:
    from impl.thd import preprocess_thd_engine

    fill = tensors.pop("fill", None)
    group: Any = dist.group.WORLD
    return preprocess_thd_engine(tensors, cp_group=group, labels_of="input_ids", fill=fill)


IDS = jagged(torch.arange(6), (5, 1))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"ids": IDS}, "there is no input_ids in the batch to make labels of, only ids"),
        ({"input_ids": IDS, "labels": IDS}, "labels are made of input_ids; rename the tensor"),
        ({"input_ids": IDS, "fill": {"id": 3}}, "fill names id, which is not in the batch: input"),
        ({"input_ids": torch.ones(2, 3)}, "(2, 3) is no jagged tensor; make one with impl.pack"),
    ],
)
def test_names_that_cannot_be_are_refused(tensors, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        _pack(**tensors)


def test_sequences_with_holes_between_them_are_refused() -> None:
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(6), torch.tensor([0, 4, 6]), lengths=torch.tensor([3, 2])
    )
    with pytest.raises(ValueError, match=r"^a jagged tensor has holes between its sequences"):
        seqlens_of(holes)


def test_output_of_other_rows_is_refused() -> None:
    from impl.thd import postprocess_thd_engine

    with pytest.raises(ValueError, match=r"^an output has 5 rows, the pack 6 real ones"):
        postprocess_thd_engine(torch.ones(5), _pack(input_ids=IDS))
