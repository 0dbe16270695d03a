"""A file of documents is read whole or not at all, and says which lines are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.batch_file import BadBatchFile, Document, batches, read_documents

GOOD = '{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}'


def write(folder: Path, *lines: str) -> Path:
    path = folder / "batch.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(BadBatchFile) as error:
        read_documents(path)
    return str(error.value)


def test_documents_are_read_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, '{"input_ids": [9], "name": "ignored"}')
    assert read_documents(path) == (
        Document((5, 6, 7), (False, True, True)),
        Document((9,), (True,)),
    )


def test_blank_lines_and_bools_in_a_mask_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path, "", GOOD, "  ", '{"input_ids": [5, 6], "loss_mask": [false, true]}', "")
    assert [document.loss_mask for document in read_documents(path)] == [
        (False, True, True),
        (False, True),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1, 2]", 'expected an object with "input_ids"'),
        ('{"tokens": [1]}', 'expected an object with "input_ids"'),
        ('{"input_ids": 5}', '"input_ids" is not a list but int'),
        ('{"input_ids": "56"}', '"input_ids" is not a list but str'),
        ('{"input_ids": null}', '"input_ids" is not a list but NoneType'),
        ('{"input_ids": []}', '"input_ids" is empty'),
        ('{"input_ids": [1, true]}', '"input_ids"[1] is True'),
        ('{"input_ids": [1, -2]}', '"input_ids"[1] is -2'),
        ('{"input_ids": [1.0]}', '"input_ids"[0] is 1.0'),
        ('{"input_ids": [NaN]}', '"input_ids"[0] is nan'),
        ('{"input_ids": [[1]]}', '"input_ids"[0] is [1]'),
        ('{"input_ids": [2147483648]}', '"input_ids"[0] is 2147483648; it must be a whole number'),
        ('{"input_ids": [1' + "0" * 5000 + "]}", "not JSON: Exceeds the limit"),
        (
            '{"input_ids": [1, 2], "loss_mask": [1]}',
            '"loss_mask" has 1 entries, "input_ids" has 2',
        ),
        ('{"input_ids": [1], "loss_mask": [2]}', '"loss_mask"[0] is 2'),
        ('{"input_ids": [1], "loss_mask": [0.5]}', '"loss_mask"[0] is 0.5'),
        ('{"input_ids": [1], "loss_mask": "1"}', '"loss_mask" is not a list but str'),
    ],
)
def test_malformed_line_is_named_and_nothing_is_read(
    tmp_path: Path, line: str, words: str
) -> None:
    message = refusal(write(tmp_path, GOOD, "", line, GOOD))
    assert "batch.jsonl:3: " in message
    assert words in message
    assert "nothing was run" in message


def test_deeply_nested_line_is_malformed_too(tmp_path: Path) -> None:
    assert "batch.jsonl:2: " in refusal(write(tmp_path, GOOD, "[" * 100_000))


def test_ten_problems_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    lines = refusal(write(tmp_path, GOOD, *["{"] * 13)).splitlines()
    assert [line.split(":")[1] for line in lines[:10]] == [str(n) for n in range(2, 12)]
    assert lines[10] == "and 3 more"
    assert len(lines) == 12


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_empty_file_holds_no_documents(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_bytes(content)
    assert refusal(path) == f"{path}: holds no documents"


def test_file_that_is_not_utf8_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\xff\xfe")
    assert f"{path}: cannot be read: " in refusal(path)


def test_missing_file_and_folder_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "absent.jsonl")
    assert "cannot be read" in refusal(tmp_path)


def test_line_ends_are_those_of_json_lines_only(tmp_path: Path) -> None:
    """A line separator of Unicode may stand inside a string; it ends no line."""
    path = write(tmp_path, '{"input_ids": [5], "text": "a\u2028b\x85c"}', GOOD)
    assert len(read_documents(path)) == 2


def test_batches_keep_order_and_lose_nothing() -> None:
    documents = tuple(Document((1,) * n, (True,) * n) for n in (3, 4, 9, 1, 2))
    cut = batches(documents, max_tokens=8)
    assert [[len(d.input_ids) for d in batch] for batch in cut] == [[3, 4], [9], [1, 2]]
