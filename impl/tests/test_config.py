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
        micro_batch_samples=None,
        min_cp_size=1,
        max_cp_size=None,
        **dataclasses.asdict(PackRules()),
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
        ({"sequence_multiple": 0}, "sequence_multiple=0 must be a whole number of at least 1"),
        ({"pack_multiple": 1.5}, "pack_multiple=1.5 must be a whole number of at least 1"),
        ({"pack_buckets": [16]}, "pack_buckets=[16] must be a tuple of row counts"),
        ({"pack_buckets": (32, 16)}, "pack_buckets=(32, 16) must ascend and name each row count "),
        ({"max_sequences": 0}, "max_sequences=0 must be a whole number of at least 1"),
        ({"micro_batch_samples": 0}, "micro_batch_samples=0 must be a whole number of at least 1"),
        (
            {"micro_batch_samples": 4, "scheduler": "balanced"},
            "micro_batch_samples=4 is for scheduler='uniform'; 'balanced' sizes its micro-batches "
            "itself, so leave it out",
        ),
    ],
)
def test_value_that_cannot_be_is_refused_by_name(settings, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        DynamicCPConfig(**{**LIMIT, **settings})


RULES: dict[str, Any] = {
    "layout": "contiguous",
    "sequence_multiple": 2,
    "pack_multiple": 16,
    "pack_buckets": (2048, 4096),
    "max_sequences": 8,
}


def test_settings_hold_all_that_packs_are_asked() -> None:
    assert {field.name for field in dataclasses.fields(PackRules)} == set(RULES)
    assert DynamicCPConfig(**LIMIT, **RULES).rules == PackRules(**RULES)
    assert DynamicCPConfig(**LIMIT).rules == PackRules()


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


def test_yaml_holds_buckets_as_a_list(tmp_path) -> None:
    path = tmp_path / "dynamic_cp.yaml"
    lines = [f"{name}: {value}" for name, value in {**LIMIT, **RULES}.items()]
    path.write_text("\n".join(lines).replace("(", "[").replace(")", "]"))
    assert DynamicCPConfig.from_yaml(path) == DynamicCPConfig(**LIMIT, **RULES)


@pytest.mark.parametrize("text", ["", "- 1\n", "zigzag\n"])
def test_yaml_that_is_no_mapping_is_refused_by_file(tmp_path, text) -> None:
    path = tmp_path / "dynamic_cp.yaml"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=re.escape(f"{path}: expected a mapping of settings, got")
    ):
        DynamicCPConfig.from_yaml(path)
