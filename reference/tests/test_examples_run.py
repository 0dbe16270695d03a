"""Examples in docstrings are what really comes out."""

import doctest
import importlib

import pytest
import torch

import reference

MODULES = ["evaluate", "groups", "outputs", "weights", "zigzag"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(f"reference.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0


def test_every_public_name_exists_and_is_documented() -> None:
    for name in reference.__all__:
        assert getattr(reference, name).__doc__, name
