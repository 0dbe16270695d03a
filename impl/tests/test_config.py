"""Settings are checked when they are made, and each message names the setting and its value."""

import dataclasses
import re
from typing import Any

import pytest

from impl.config import DynamicCPConfig
from impl.rules import PackRules

LIMIT: dict[str, Any] = {"max_seqlen_per_dp_cp_rank": 4096}


def test_only_the_limit_is_needed() -> None:
    config = DynamicCPConfig(**LIMIT)

    assert config == DynamicCPConfig(
        max_seqlen_per_dp_cp_rank=4096,
        dynamic_context_parallel=True,
        scheduler="uniform",
        layout="zigzag",
        min_cp_size=1,
        max_cp_size=None,
    )


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DynamicCPConfig(**LIMIT).min_cp_size = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"max_seqlen_per_dp_cp_rank": 0},
            "max_seqlen_per_dp_cp_rank=0 must be a whole number of at least 1",
        ),
        (
            {"max_seqlen_per_dp_cp_rank": None},
            "max_seqlen_per_dp_cp_rank=None must be a whole number of at least 1",
        ),
        (
            {"max_seqlen_per_dp_cp_rank": 4096.0},
            "max_seqlen_per_dp_cp_rank=4096.0 must be a whole number of at least 1",
        ),
        ({"min_cp_size": True}, "min_cp_size=True must be a whole number of at least 1"),
        ({"min_cp_size": None}, "min_cp_size=None must be a whole number of at least 1"),
        ({"max_cp_size": "8"}, "max_cp_size='8' must be a whole number of at least 1"),
        ({"min_cp_size": 4, "max_cp_size": 2}, "max_cp_size=2 is below min_cp_size=4"),
        (
            {"dynamic_context_parallel": "no"},
            "dynamic_context_parallel='no' must be true or false",
        ),
        ({"scheduler": "greedy"}, "scheduler='greedy' is not one of "),
        ({"layout": "stripes"}, "layout='stripes' is not one of zigzag, contiguous"),
    ],
)
def test_value_that_cannot_be_is_refused_by_name(settings, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        DynamicCPConfig(**{**LIMIT, **settings})


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_every_layout_of_packs_can_be_asked_for(layout) -> None:
    assert DynamicCPConfig(**LIMIT, layout=layout).layout == PackRules(layout=layout).layout


def test_mapping_gives_the_same_settings() -> None:
    settings = {**LIMIT, "min_cp_size": 2, "max_cp_size": 8}
    assert DynamicCPConfig.from_mapping(settings) == DynamicCPConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**LIMIT, "cp_size": 2, "zig": 1}, "unknown cp_size, zig; known are "),
        ({}, "max_seqlen_per_dp_cp_rank is missing: tokens of a sequence per rank"),
    ],
)
def test_mapping_with_a_wrong_key_is_refused(settings, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        DynamicCPConfig.from_mapping(settings)


def test_yaml_gives_the_same_settings(tmp_path) -> None:
    path = tmp_path / "dynamic_cp.yaml"
    path.write_text("max_seqlen_per_dp_cp_rank: 4096\nmax_cp_size: null\n")
    assert DynamicCPConfig.from_yaml(path) == DynamicCPConfig(**LIMIT)


@pytest.mark.parametrize("text", ["", "- 1\n", "zigzag\n"])
def test_yaml_that_is_no_mapping_is_refused_by_file(tmp_path, text) -> None:
    path = tmp_path / "dynamic_cp.yaml"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=re.escape(f"{path}: expected a mapping of settings, got")
    ):
        DynamicCPConfig.from_yaml(path)
