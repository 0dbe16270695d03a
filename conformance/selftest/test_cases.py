"""Cases: their ids, what their lengths and masks are like, and that each could catch something."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from conformance.adapters.reference import oracle
from conformance.batch_file import batches, read_documents
from conformance.build import TaskBuilder
from conformance.case import LOSSES, Case, parse_case
from conformance.conftest import TEXT_TOKENS, TEXTS
from conformance.judge import BUDGET
from conformance.lengths import COLUMNS, POISONS, REFUSALS
from conformance.profiles import CP_SIZES, PROFILES, profile_cases, rows
from conformance.protocol import Batch, Outputs, Schedule, Task

DOCUMENTS = batches(read_documents(TEXTS), max_tokens=TEXT_TOKENS)
DEFAULT = profile_cases("default", num_texts=len(DOCUMENTS))
BUILDER = TaskBuilder(oracle, texts=DOCUMENTS)
UNITS = {size: 2 * size if size > 1 else 1 for size in (1, 2, 3, 4, 6, 8)}  # padded lengths divide


def of_column(column: str) -> list[Case]:
    """One-pass default cases of a padding column at a single CP size."""
    return [case for case in DEFAULT if case.column == column and len(case.cp_sizes) == 1]


# Ids


@pytest.mark.parametrize("profile", PROFILES)
def test_every_id_reads_back_as_its_case(profile: str) -> None:
    for case in profile_cases(profile, num_texts=3):
        assert parse_case(case.id) == case


@pytest.mark.parametrize("profile", PROFILES)
def test_ids_are_unique(profile: str) -> None:
    ids = [case.id for case in profile_cases(profile, num_texts=3)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("", "'' is not a case id; ids look like ragged-4ranks-cp2"),
        ("ragged", "'ragged' is not a case id"),
        ("ragged-4ranks", "is not a case id"),
        ("ragged-cp2-4ranks", "is not a case id"),
        ("Ragged-4ranks-cp2", "is not a case id"),
        ("ragged-4ranks-cp2 ", "is not a case id"),
        ("ragged--4ranks-cp2", "is not a case id"),
        ("ragged-4ranks-cp", "is not a case id"),
        ("ragged-4ranks-cp2++1", "cp2++1 is no plan; write cp2, cp4+2, cp4+2_1_1, cp2.1.2 or"),
        ("ragged-4ranks-cp2_", "cp2_ is no plan"),
        ("ragged-4ranks-cpgreedy24", "cpgreedy24 is no plan"),
        ("ragged-4ranks-cpbalanced", "cpbalanced is no plan"),
        ("ragged-4ranks-cp0", "ranks and CP sizes start at 1"),
        ("ragged-4ranks-cp2-tp", "'tp' is not one of uneven"),
        ("ragged-4ranks-cp2-sp2", "'sp2' is not one of uneven"),
        ("ragged-4ranks-cp1-tp3", "4 ranks are no multiple of the 3 that tp3 takes"),
        ("ragged-4ranks-cp1-tp2-pp2-static2", "of the 8 that tp2-pp2-static2 takes"),
        ("ragged-4ranks-cp2.", "cp2. is no plan"),
        ("ragged-4ranks-cp2-interrupted", "the first pass is not interrupted; write cp2.2 or"),
        ("ragged-4ranks-cp2.2-pp2-interrupted", "not interrupted with pipeline stages: all but"),
        ("ragged-4ranks-cp2-fp8", "'fp8' is not one of uneven, full, single"),
        ("smooth-4ranks-cp2", "'smooth' is not one of aligned, unpadded"),
    ],
)
def test_malformed_id_says_what_is_wrong(id: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_case(id)


@pytest.mark.parametrize("id", ["lensa-2ranks-cp1", "lens5__3-2ranks-cp1", "lens-2ranks-cp1"])
def test_lengths_that_are_no_numbers_say_how_to_write_them(id: str) -> None:
    with pytest.raises(ValueError, match="write lengths of 1 and more as lens5_13_1"):
        _ = parse_case(id).seqlens


def test_few_samples_need_two_ranks() -> None:
    with pytest.raises(ValueError, match="take 2 ranks or more"):
        _ = parse_case("few-1ranks-cp1").seqlens


def test_text_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="text9-4ranks-cp2: there are 0 batches of text"):
        TaskBuilder(oracle).seqlens(parse_case("text9-4ranks-cp2"))


# How much is covered


def test_default_profile_has_250_distinct_cases() -> None:
    runs = [case for case in DEFAULT if not case.expects_refusal]
    keys = {(BUILDER.seqlens(case), case.world, case.cp, case.mask) for case in runs}
    assert len(keys) >= 250


@pytest.mark.parametrize("column", [c for c in COLUMNS if c not in ("text", "refused")])
def test_every_column_is_run_at_every_cp_size(column: str) -> None:
    pairs = {(case.world, case.cp_sizes[0]) for case in of_column(column)}
    assert {size for _, size in pairs} >= {1, 2, 4, 8, 3, 6}
    assert {(3, 3), (6, 6), (8, 8)} <= pairs


def test_text_and_refusals_are_run_too() -> None:
    assert {case.cp_sizes[0] for case in of_column("text")} == {1, 2, 3, 4, 6, 8}
    assert {case.padding for case in of_column("refused")} == {f"refused_{r}" for r in REFUSALS}
    assert {case.padding for case in of_column("poisoned")} == {f"poisoned_{p}" for p in POISONS}


def test_every_world_mixes_cp_sizes_in_a_step_and_in_passes() -> None:
    steps = {
        case.world
        for case in DEFAULT
        if any(not isinstance(step, Schedule) and len(step) > 1 for step in case.cp)
    }
    passes = {case.world for case in DEFAULT if len(case.cp) == 3 and case.cp[0] == case.cp[2]}
    assert passes == set(CP_SIZES) - {1}
    assert steps >= passes


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_interrupts_passes_and_has_every_loss(profile: str) -> None:
    cases = profile_cases(profile)
    assert {case.loss for case in cases} == set(LOSSES)
    asked = {BUILDER.task(case).needs for case in cases if case.interrupted}
    assert {frozenset({"interrupted"}), frozenset({"interrupted", "mixed"})} <= asked


def test_rows_of_a_matrix_have_one_order() -> None:
    order = rows()
    assert len(set(order)) == len(order)
    assert {case.row for case in profile_cases("deep", num_texts=1)} <= set(order)
    some = ("aligned", "text", "own", "uniform", "megatron", "schedulers", "tp2", "tp2-sp", "pp2")
    assert sorted(some, key=order.index) == list(some)


# What lengths and masks are like


def padded(case: Case) -> list[bool]:
    """For each sequence, whether it has padding."""
    return [seqlen % UNITS[case.cp_sizes[0]] > 0 for seqlen in case.seqlens]


LENGTHS: dict[str, Callable[[Case, tuple[int, ...], int], bool]] = {
    "aligned": lambda case, lens, cp: all(
        n % (2 * size) == 0 for n in lens for size in CP_SIZES[case.world]
    ),
    "unpadded": lambda case, lens, cp: not any(padded(case)) and max(lens) > 3 * min(lens),
    "ragged": lambda case, lens, cp: (
        len(set(lens)) == len(lens) and (cp == 1 or any(padded(case)))
    ),
    "short": lambda case, lens, cp: cp == 1 or max(lens) < 2 * cp,
    "ones": lambda case, lens, cp: lens.count(1) > len(lens) // 2 and max(lens) > 1,
    "longtail": lambda case, lens, cp: max(lens) > 10 * sorted(lens)[-2],
    "equal": lambda case, lens, cp: len(set(lens)) == 1 and len(lens) > 1,
    "few": lambda case, lens, cp: len(lens) < case.world,
    "uneven": lambda case, lens, cp: case.world == cp or len(lens) % (case.world // cp) > 0,
    "poisoned": lambda case, lens, cp: cp == 1 or any(padded(case)),
}


@pytest.mark.parametrize("column", LENGTHS)
def test_lengths_are_what_their_column_says(column: str) -> None:
    for case in of_column(column):
        assert LENGTHS[column](case, case.seqlens, case.cp_sizes[0]), (case.id, case.seqlens)


def valid_predictions(case: Case) -> list[torch.Tensor]:
    """Per sequence, the tokens at which a valid prediction is made."""
    masks = BUILDER.task(case).batch.loss_mask
    return [mask[1:].nonzero()[:, 0] for mask in masks]


@pytest.mark.parametrize("world", [4, 8])
def test_single_mask_has_one_valid_prediction(world: int) -> None:
    for cp in CP_SIZES[world]:
        valid = valid_predictions(Case("ragged", world, ((cp,),), mask="single"))
        assert sum(map(len, valid)) == 1


@pytest.mark.parametrize(("world", "cp"), [(3, 3), (4, 2), (4, 4), (6, 6), (8, 2), (8, 8)])
def test_shard_mask_leaves_all_cp_ranks_but_the_first_without_one(world: int, cp: int) -> None:
    case = Case("ragged", world, ((cp,),), mask="shard")
    for seqlen, valid in zip(case.seqlens, valid_predictions(case), strict=True):
        assert (valid < -(-seqlen // (2 * cp))).all()
    assert sum(map(len, valid_predictions(case))) > 1


@pytest.mark.parametrize(("world", "cp"), [(4, 1), (4, 2), (8, 4)])
def test_rank_mask_leaves_other_groups_without_one(world: int, cp: int) -> None:
    case = Case("ragged", world, ((cp,),), mask="rank")
    groups = oracle.index.split(case.seqlens, world_size=world, cp_size=cp)
    valid = valid_predictions(case)
    assert sum(any(len(valid[sample]) for sample in group) for group in groups) == 1


def test_none_mask_has_no_valid_prediction() -> None:
    assert not any(map(len, valid_predictions(parse_case("ragged-4ranks-cp2-none"))))


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_uneven_mask_differs_between_sequences(cp: int) -> None:
    valid = valid_predictions(Case("ragged", 4, ((cp,),)))
    assert len({len(tokens) for tokens in valid}) > 1


# Signal: what a wrong token, temperature or mask entry would move


def moved(before: Outputs, after: Outputs) -> dict[str, float]:
    """How far each output moved, in budgets."""
    pairs = {
        "logits": (torch.cat(before.logits), torch.cat(after.logits)),
        "logprobs": (torch.cat(before.logprobs), torch.cat(after.logprobs)),
        "entropy": (torch.cat(before.entropy), torch.cat(after.entropy)),
        "loss": (before.loss, after.loss),
        "gradients": (_flat(before), _flat(after)),
    }
    return {
        name: float((b - a).abs().max() / b.abs().max() / BUDGET) for name, (b, a) in pairs.items()
    }


def _flat(outputs: Outputs) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in outputs.gradients.values()])


def other_token(batch: Batch, sequence: int) -> Batch:
    ids = [ids.clone() for ids in batch.input_ids]
    ids[sequence][0] = (ids[sequence][0] + 1) % 63
    return replace(batch, input_ids=tuple(ids))


def other_temperature(batch: Batch, sequence: int) -> Batch:
    changed = [1.01 * t if i == sequence else t for i, t in enumerate(batch.temperature)]
    return replace(batch, temperature=tuple(changed))


def other_mask(batch: Batch, sequence: int) -> Batch:
    mask = [mask.clone() for mask in batch.loss_mask]
    mask[sequence][-1] = ~mask[sequence][-1]
    return replace(batch, loss_mask=tuple(mask))


@pytest.mark.parametrize(
    ("change", "outputs"),
    [
        (other_token, ("logits", "logprobs", "entropy", "loss", "gradients")),
        (other_temperature, ("logprobs", "entropy", "gradients")),
        (other_mask, ("gradients",)),
    ],
    ids=["token", "temperature", "mask"],
)
@pytest.mark.parametrize(
    "id",
    [
        "ragged-4ranks-cp2",
        "longtail-8ranks-cp8",
        "short-4ranks-cp4",
        "uneven-4ranks-cp2-teach-entropy",
        "few_one-4ranks-cp4",
        "ragged-4ranks-cp2-qwen3",
    ],
)
def test_one_changed_input_moves_outputs_by_a_million_budgets(
    id: str, change: Callable[[Batch, int], Batch], outputs: tuple[str, ...]
) -> None:
    task: Task = BUILDER.task(parse_case(id))
    longest = task.batch.seqlens.index(max(task.batch.seqlens))
    truths = [
        oracle.evaluate(task.model, task.weights, batch, task.loss)
        for batch in (task.batch, change(task.batch, longest))
    ]
    far = moved(*truths)
    assert {name: far[name] for name in outputs if far[name] < 1e6} == {}
