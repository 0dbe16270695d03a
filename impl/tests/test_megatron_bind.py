"""A micro-batch's CP group is bound for exactly one call, and what was there comes back."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


class Layer(torch.nn.Module):
    """A layer around an attention that notes the groups it is called with."""

    def __init__(self, groups: SimpleNamespace, fails: bool = False) -> None:
        from megatron.core.transformer.attention import SelfAttention

        super().__init__()
        attention = object.__new__(SelfAttention)
        torch.nn.Module.__init__(attention)
        attention.pg_collection = groups
        attention.forward = self.note
        self.attention, self.groups, self.fails = attention, groups, fails
        self.seen: list[object] = []

    def note(self, hidden, packed_seq_params=None):
        self.seen.append(self.groups.cp)
        if self.fails:
            raise ArithmeticError("inside a layer")
        return hidden, packed_seq_params

    def forward(self, hidden, **keywords):
        return self.attention(hidden, **keywords)


def _bound(**options) -> Layer:
    from impl.megatron.bind import bind_packed_cp_group

    layer = Layer(SimpleNamespace(cp="built with", tp="untouched"), **options)
    bind_packed_cp_group(layer)
    return layer


def _packed(group: object) -> SimpleNamespace:
    return SimpleNamespace(cp_group=group)


def test_attention_sees_the_group_it_is_called_with() -> None:
    layer = _bound()
    packed = _packed("A")

    assert layer(1, packed_seq_params=packed) == (1, packed)
    assert layer.seen == ["A"]


def test_what_was_there_comes_back_after_every_call() -> None:
    layer = _bound()
    for group in "ABA":
        layer(1, packed_seq_params=_packed(group))
        assert layer.groups == SimpleNamespace(cp="built with", tp="untouched")

    assert layer.seen == ["A", "B", "A"]


def test_what_was_there_comes_back_after_an_exception() -> None:
    layer = _bound(fails=True)
    with pytest.raises(ArithmeticError, match=r"^inside a layer$"):
        layer(1, packed_seq_params=_packed("A"))

    assert layer.seen == ["A"]
    assert layer.groups.cp == "built with"


@pytest.mark.parametrize("packed", [None, _packed(None), SimpleNamespace()])
def test_call_without_a_group_keeps_the_one_it_was_built_with(packed) -> None:
    layer = _bound()
    layer(1, packed_seq_params=packed)

    assert layer.seen == ["built with"]


def test_only_this_model_is_bound() -> None:
    from megatron.core.transformer.attention import SelfAttention

    before = SelfAttention.forward
    _bound()
    other = Layer(SimpleNamespace(cp="built with"))
    other(1, packed_seq_params=_packed("A"))

    assert SelfAttention.forward is before
    assert other.seen == ["built with"]


def test_every_attention_of_a_model_is_bound() -> None:
    from impl.megatron.bind import bind_packed_cp_group

    groups = SimpleNamespace(cp="built with")
    layers = [Layer(groups), Layer(groups)]
    bind_packed_cp_group(torch.nn.Sequential(layers[0], torch.nn.Sequential(layers[1])))
    for layer in layers:
        layer(1, packed_seq_params=_packed("A"))
        assert layer.seen == ["A"]
