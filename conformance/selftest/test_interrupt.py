"""A pass that is made to fail inside a layer, and the CP groups that it may leave bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.adapters.impl_binding import BoundGroups, interrupt


class Layer(nn.Module):
    """Holds a CP group as modules of Megatron do."""

    def __init__(self) -> None:
        super().__init__()
        self.core_attention = nn.Identity()
        self.pg_collection = SimpleNamespace(cp="built with")
        self.ran = 0

    def forward(self, x: Tensor) -> Tensor:
        self.ran += 1
        attended: Tensor = self.core_attention(x)
        return attended


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(Layer(), Layer())


def test_pass_fails_in_the_last_layer_and_the_next_one_runs(model: nn.Sequential) -> None:
    rows = torch.ones(3)
    interrupt([model], lambda: model(rows))
    assert [layer.ran for layer in model] == [1, 1]
    assert model(rows) is rows


def test_exception_that_does_not_come_out_is_an_error(model: nn.Sequential) -> None:
    def swallowing() -> None:
        with pytest.raises(Exception, match=r"^$"):
            model(torch.ones(3))

    with pytest.raises(RuntimeError, match="inside the last layer did not come out of the pass"):
        interrupt([model], swallowing)
    model(torch.ones(3))


def test_error_of_the_pass_itself_is_not_swallowed(model: nn.Sequential) -> None:
    def wrong() -> None:
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        interrupt([model], wrong)


def test_group_that_is_not_put_back_is_found_in_any_module(model: nn.Sequential) -> None:
    bound = BoundGroups([model])
    bound.check("a good pass")
    last: Any = model[1]
    last.pg_collection.cp = "another"
    with pytest.raises(RuntimeError, match="a CP group is still bound to the model after a bad"):
        bound.check("a bad pass")
