"""What the example refuses before anything runs, and what a step is given."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from examples.data import as_tensors, batches, read_documents
from examples.history import History, compare, in_words
from examples.settings import BatchSettings, read_settings

YAML = Path(__file__).resolve().parents[1] / "train.yaml"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.num_layer=2", "model: unknown num_layer; known are activation, "),
        ("model.num_heads=7", "model: num_heads=7 is not a multiple of num_kv_heads=2"),
        ("model.hidden_size=wide", "model: hidden_size='wide' must be an integer"),
        ("model.rope_theta=high", "model: '<' not supported between instances of"),
        ("dynamic_cp.scheduler=fast", "dynamic_cp: scheduler='fast' is not one of"),
        ("dynamic_cp={}", "dynamic_cp: max_seqlen_per_dp_cp_rank missing"),
        ("parallel.tp_size=0", "parallel: tp_size=0 must be a whole number"),
        ("optimizer.lr=1e-3", "optimizer: lr='1e-3' must be a number .* write 1.0e-3"),
        ("optimizer.lr=-1.0", "optimizer: lr=-1.0 must be a number of at least 0"),
        ("optimizer.adam_beta2=1.0", "adam_beta2=1.0 must be below 1"),
        ("batch.tokens=0", "batch: tokens=0 must be a whole number of at least 1"),
        ("steps=0", "steps=0 must be a whole number of at least 1"),
        ("step=3", "unknown step; known are batch, "),
        ("out=", "out=None must be a path"),
        ("optimizer=adam", "optimizer must be a section of settings, got 'adam'"),
        ("model.sizes.hidden=3", "--set model.sizes.hidden=3: write section.name=value"),
        ("steps={", "not YAML: "),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(YAML, [change])


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        ("parallel.tp_size=2", 3, "world_size=3 is not a multiple of tp_size=2"),
        ("parallel.pp_size=3", 3, "num_layers=4 is not a multiple of pp_size=3"),
        ("dynamic_cp.max_seqlen_per_dp_cp_rank=256", 2, "has 1024 tokens, which no CP size fits"),
    ],
)
def test_ranks_that_cannot_run_it_are_refused(change, ranks, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(YAML, [change]).check_ranks(ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_settings_as_they_are_run_on_any_number_of_ranks(ranks) -> None:
    read_settings(YAML).check_ranks(ranks)


def _batch_settings() -> BatchSettings:
    return read_settings(YAML).batch


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size=100 is too small: .* has id 122"):
        read_documents(_batch_settings(), vocab_size=100)


def test_texts_that_are_not_there_are_refused() -> None:
    settings = replace(_batch_settings(), texts="fixtures/none.jsonl")

    with pytest.raises(ValueError, match=r"texts=fixtures/none\.jsonl: there is no file"):
        read_documents(settings, vocab_size=256)


def test_texts_of_another_kind_are_refused_by_line(tmp_path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"input_ids": [1], "loss_mask": [1]}\n{"text": "a"}\n')
    settings = replace(_batch_settings(), texts=str(tmp_path / "texts.jsonl"))

    with pytest.raises(ValueError, match=r"texts.jsonl, line 2: no input_ids and loss_mask"):
        read_documents(settings, vocab_size=256)


def test_batches_keep_to_the_tokens_and_are_drawn_by_the_seed() -> None:
    documents = read_documents(_batch_settings(), vocab_size=256)
    first, again, other = (
        list(islice(batches(documents, tokens=2000, seed=seed), 100)) for seed in (0, 0, 1)
    )

    assert all(1000 < sum(len(one.ids) for one in batch) <= 2000 for batch in first)
    assert [[id(one) for one in batch] for batch in first] == [
        [id(one) for one in batch] for batch in again
    ]
    assert [id(one) for one in first[0]] != [id(one) for one in other[0]]


def test_weights_make_the_loss_a_mean_over_the_targets() -> None:
    documents = read_documents(_batch_settings(), vocab_size=256)
    tensors = as_tensors(tuple(documents[:5]), torch.device("cpu"))
    targets = sum(int(one.mask[1:].sum()) for one in documents[:5])

    weights = tensors["weights"].values()
    assert weights[weights > 0].tolist() == [1 / targets] * targets


@pytest.mark.parametrize(("difference", "status"), [(0.0, 0), (1e-8, 0), (1e-6, 1)])
@pytest.mark.parametrize("where", ["losses", "weights"])
def test_runs_that_differ_do_not_pass(where, difference, status) -> None:
    def history(difference: float) -> History:
        weight = torch.tensor([1.0, 0.5 + difference * (where == "weights")], dtype=torch.float64)
        loss = 1.0 + difference * (where == "losses")
        return History(losses=[1.0, loss], weights=[{"w": weight}])

    assert compare(history(difference), history(0.0), Console(quiet=True)) == status


def test_weights_that_are_not_numbers_do_not_pass() -> None:
    bad = History(losses=[1.0], weights=[{"w": torch.tensor([float("nan")])}])
    good = History(losses=[1.0], weights=[{"w": torch.ones(1)}])

    assert compare(bad, good, Console(quiet=True)) == 1


def test_cp_sizes_in_words() -> None:
    assert in_words([2, 1, 1]) == "CP 2×1 1×2"
