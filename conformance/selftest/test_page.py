"""What a browser makes of the page."""

from html.parser import HTMLParser

import pytest

from conformance.page import render_page
from conformance.selftest.report_samples import failure, report, result
from conformance.verdict import Verdict


class _Page(HTMLParser):
    """Tags, the text of every table row, and whatever would load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.rows: list[str] = []
        self.feed(text)

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.rows.append("")

    def handle_starttag(self, tag: str, attributes) -> None:
        self.tags.append(tag)
        self.loads += [f"{key}={value}" for key, value in attributes if key in {"src", "href"}]
        if tag == "tr":
            self.rows.append("")

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1] += f"{data} " if data.strip() else ""


def test_page_loads_nothing() -> None:
    text = render_page([report(failure(), result())])

    assert _Page(text).loads == []
    assert "url(" not in text
    assert "@import" not in text


@pytest.mark.parametrize("field", ["id", "check", "padding", "where", "reason", "rerun"])
def test_page_escapes_whatever_an_implementation_says(field: str) -> None:
    attack = '"><script>alert(1)</script>'
    text = render_page([report(failure(**{field: attack}))])

    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "script" not in _Page(text).tags


def test_page_escapes_why_a_version_did_not_run() -> None:
    text = render_page([report(result())], not_run={"<b>": "<script>x</script>"})

    assert "&lt;b&gt;: not run" in text
    assert "&lt;script&gt;x&lt;/script&gt;" in text
    assert not {"script", "b"} & set(_Page(text).tags)


def test_page_of_one_version_has_a_row_for_each_padding_case() -> None:
    page = _Page(render_page([report(result("a"), failure("b", cp=(4, 1), padding="nan"))]))

    assert [row.split() for row in page.rows[:3]] == [
        ["padding", "CP", "1", "2", "3", "4", "6", "8", "mixed"],
        ["zero", "·", "✓", "0.001", "·", "·", "·", "·", "·"],
        ["nan", "·", "·", "·", "·", "·", "·", "✗", "1/1", "3e+07"],
    ]


def test_page_of_versions_has_a_row_for_each_in_every_padding_case() -> None:
    reports = [report(failure("a"), megatron="0.16.1"), report(result("a"))]
    page = _Page(render_page(reports))

    assert [row.split() for row in page.rows[:4]] == [
        ["version", "CP", "1", "2", "3", "4", "6", "8", "mixed"],
        ["zero"],
        ["0.16.1", "·", "✗", "1/1", "3e+07", "·", "·", "·", "·", "·"],
        ["0.19.2", "·", "✓", "0.001", "·", "·", "·", "·", "·"],
    ]


def test_page_never_calls_a_run_passed_that_verified_nothing() -> None:
    nothing = render_page([report(result(verdict=Verdict.SKIPPED))])

    assert "nothing could be verified" in nothing
    assert "all that ran passed" not in nothing
    assert "all that ran passed" in render_page([report(result())])


def test_page_without_a_single_report_says_why() -> None:
    assert "no Python 3.12" in render_page([], not_run={"cpu-mcore0171": "no Python 3.12"})
