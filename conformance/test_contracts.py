"""The contracts that public bugs break most, by name: `python -m tools verify -k contracts`.

Each looks at its own checks of a few cases, which cost nothing where `test_conformance.py` has
already run them. Options that choose cases leave out the contracts' other cases too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .contracts import (
    BIND_AND_RESTORE,
    CP_OFF,
    GROUPS,
    PADDING,
    POSITIONS,
    SCALE,
    Contract,
)

Prove = Callable[[Contract, str], None]


@pytest.mark.parametrize("id", GROUPS.cases)
def test_groups_are_the_same_on_every_rank_and_others_are_refused(id: str, prove: Prove) -> None:
    prove(GROUPS, id)


@pytest.mark.parametrize("id", BIND_AND_RESTORE.cases)
def test_group_is_bound_for_one_call_and_put_back(id: str, prove: Prove) -> None:
    prove(BIND_AND_RESTORE, id)


@pytest.mark.parametrize("id", POSITIONS.cases)
def test_positions_restart_and_labels_are_shifted_before_the_split(id: str, prove: Prove) -> None:
    prove(POSITIONS, id)


@pytest.mark.parametrize("id", PADDING.cases)
def test_padding_never_reaches_a_token_a_loss_or_a_gradient(id: str, prove: Prove) -> None:
    prove(PADDING, id)


@pytest.mark.parametrize("id", SCALE.cases)
def test_gradients_are_those_of_the_unsharded_batch(id: str, prove: Prove) -> None:
    prove(SCALE, id)


@pytest.mark.parametrize("id", CP_OFF.cases)
def test_cp_size_1_means_cp_is_off(id: str, prove: Prove) -> None:
    prove(CP_OFF, id)
