"""Every mistake a caller can make has an error that names it, its values and the way out."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import reference
from reference import Batch, Loss, check_weights, evaluate, evaluate_packed, random_weights

from .small_models import random_batch, small_config

IDS = (torch.tensor([1, 2, 3]), torch.tensor([4]))
MASK = (torch.tensor([True] * 3), torch.tensor([True]))
CONFIG = small_config(num_layers=1)
WEIGHTS = random_weights(CONFIG, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 must be an integer of at least 1"),
        ({"head_dim": 8.0}, "head_dim=8.0 must be an integer of at least 1"),
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"norm": "batchnorm"}, "norm='batchnorm' is unknown; choose one of rmsnorm, layernorm"),
        ({"activation": "relu"}, "activation='relu' is unknown; choose one of swiglu, geglu_tanh"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 must be positive and finite"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0 must be positive and finite"),
        ({"rope_fraction": 1.5}, "rope_fraction=1.5 must be above 0 and at most 1"),
        (
            {"rope_fraction": 0.4},
            "rope_fraction=0.4 turns 3 of head_dim=8 dims; dims turn",
        ),
        ({"rope_fraction": 0.1}, "rope_fraction=0.1 turns 0 of head_dim=8 dims"),
    ],
)
def test_config_rejects_what_does_not_fit(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        small_config(**changes)


@pytest.mark.parametrize(
    ("ids", "mask", "temperature", "message"),
    [
        ((), (), (), "the batch has no sequence; give at least one"),
        (IDS, MASK[:1], (1, 1), "loss_mask has 1 entries for 2 sequences; give one for each"),
        (IDS, MASK, (1,), "temperature has 1 entries for 2 sequences; give one for each"),
        ((IDS[0], IDS[1][:0]), MASK, (1, 1), "sequence 1 is empty; leave it out of the batch"),
        ((IDS[0].int(), IDS[1]), MASK, (1, 1), "sequence 0: input_ids are torch.int32 of shape"),
        ((IDS[0], IDS[1][None]), MASK, (1, 1), "sequence 1: input_ids are torch.int64 of shape"),
        (IDS, (MASK[0], MASK[0]), (1, 1), "sequence 1: loss_mask has shape (3,) for 1 tokens"),
        (IDS, (MASK[0].int(), MASK[1]), (1, 1), "sequence 0: loss_mask is torch.int32; give"),
        (IDS, MASK, (1, 0), "sequence 1: temperature=0 must be positive and finite"),
        (IDS, MASK, (-0.5, 1), "sequence 0: temperature=-0.5 must be positive and finite"),
        (IDS, MASK, (1, float("nan")), "sequence 1: temperature=nan must be positive and finite"),
    ],
)
def test_batch_names_the_sequence_that_is_wrong(
    ids: tuple[Tensor, ...],
    mask: tuple[Tensor, ...],
    temperature: tuple[float, ...],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Batch(ids, mask, temperature)


ZEROS = (torch.zeros(3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (ZEROS[:1], "loss_weights has 1 entries for 2 sequences; give one for each"),
        (
            (ZEROS[0].float(), ZEROS[1]),
            "sequence 0: loss_weights are torch.float32 of shape (3,) for 3 tokens; give float64",
        ),
        ((ZEROS[0], ZEROS[0]), "sequence 1: loss_weights are torch.float64 of shape (3,) for 1"),
        (
            (ZEROS[0], ZEROS[1] + 0.5),
            "sequence 1: the last token has loss weight 0.5 but predicts nothing; give 0",
        ),
        (
            (ZEROS[0].index_fill(0, torch.tensor([1]), float("nan")), ZEROS[1]),
            "sequence 0, token 1: loss weight nan of a prediction that counts must be finite",
        ),
    ],
)
def test_loss_weights_that_cannot_be_meant_are_named(
    weights: tuple[Tensor, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Batch(IDS, MASK, (1, 1), weights)


@pytest.mark.parametrize("compute", [evaluate, evaluate_packed])
def test_own_weights_that_are_not_there_are_asked_for(compute) -> None:
    message = "aggregation='own-weights' needs weights; give the batch loss_weights, float64"
    with pytest.raises(ValueError, match=message):
        compute(CONFIG, WEIGHTS, Batch(IDS, MASK, (1, 1)), Loss("own-weights"))


@pytest.mark.parametrize("compute", [evaluate, evaluate_packed])
@pytest.mark.parametrize("outside", [-1, CONFIG.vocab_size])
def test_an_id_outside_the_vocabulary_is_named(compute, outside: int) -> None:
    batch = Batch((IDS[1], torch.tensor([0, 1, outside])), (MASK[1], MASK[0]), (1, 1))
    with pytest.raises(ValueError, match=f"sequence 1, token 2: id {outside} is outside"):
        compute(CONFIG, WEIGHTS, batch, Loss())


@pytest.mark.parametrize("compute", [evaluate, evaluate_packed])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head.weight": None}, "weights lack lm_head.weight"),
        ({"lm_head.bias": torch.zeros(53).double()}, "this model has no lm_head.bias"),
        ({"model.norm.weight": torch.ones(7).double()}, r"model.norm.weight has shape \(7,\)"),
        ({"model.norm.weight": torch.ones(24)}, "model.norm.weight is torch.float32, not"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(
    compute, changes: dict[str, Tensor | None], message: str
) -> None:
    weights = {name: w for name, w in {**WEIGHTS, **changes}.items() if w is not None}
    with pytest.raises(ValueError, match=message):
        compute(CONFIG, weights, random_batch((3,)), Loss())


def test_weights_that_fit_are_accepted() -> None:
    check_weights(CONFIG, WEIGHTS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Loss("mean"), "aggregation='mean' is unknown; choose one of token-mean"),
        (lambda: Loss(entropy_coeff=float("inf")), "entropy_coeff=inf must be finite"),
        (lambda: reference.logprobs(torch.zeros(2, 5), IDS[0], 1), "one id for each row"),
        (lambda: reference.entropy(torch.zeros(5), 1), "give [L, V] with L at least 1"),
        (lambda: reference.entropy(torch.zeros(1, 5), 0), "temperature=0 must be positive"),
        (lambda: reference.alignment(0), "cp_size=0 and tp_size=1 must be at least 1"),
        (lambda: reference.padded_length(0, cp_size=2), "seqlen=0 must be at least 1"),
        (lambda: reference.packed_rows([4], cp_size=2, cp_rank=2), "cp_rank=2 is not one of"),
        (lambda: reference.packed_tokens([], cp_size=2, cp_rank=0, pad_value=0), "no sequence"),
        (lambda: reference.next_token_labels(IDS[0][:0], 0), "the sequence is empty"),
        (lambda: reference.unpack([IDS[0]], [3], cp_size=2), "1 shards for cp_size=2; give one"),
        (lambda: reference.unpack([IDS[0]] * 2, [4], cp_size=2), "the shard of rank 0 has 3 rows"),
        (lambda: reference.split([3], world_size=4, cp_size=3), "cp_size=3 does not divide"),
        (lambda: reference.split([], world_size=4, cp_size=2), "there is no sequence"),
        (lambda: reference.split([3, 0], world_size=4, cp_size=2), "sequence 1 has length 0"),
        (
            lambda: reference.choose_local_cp_size([3], world_size=0, max_seqlen_per_dp_cp_rank=1),
            "world_size=0 and max_seqlen_per_dp_cp_rank=1 must be at least 1",
        ),
    ],
)
def test_calls_reject_what_they_cannot_answer(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
