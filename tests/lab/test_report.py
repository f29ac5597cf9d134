"""The report: everything from the rows, the same bytes each time, nothing from elsewhere."""

from __future__ import annotations

import dataclasses
import html.parser
import re
from pathlib import Path

import pytest

from normkit.lab.claim import Claim, Row
from normkit.lab.claims import all_claims
from normkit.lab.executors import Inline
from normkit.lab.report import ReportError, write
from normkit.lab.run import tasks_of
from tests.lab import claims_for_tests as made


def claims() -> list[Claim]:
    return [
        dataclasses.replace(
            made.make(made.number, [{"a": a} for a in range(3)], seeds=3, name="first"), kind="measured"
        ),
        made.make(made.number, [{"a": 200}], name="second"),
        made.make(made.sometimes_raises, [{"a": 0}, {"a": 1}], name="third"),
        made.make(made.number, [{"a": 1}], name="fourth"),
    ]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(Inline().run(tasks_of(claims()[:3])))


class Page(html.parser.HTMLParser):
    """The tags of a page, with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_claim_has_all_of_its_parts(tmp_path: Path, rows: list[Row]) -> None:
    report = write(claims(), rows, tmp_path)
    assert report.counts == [("holds", 1), ("wrong as stated", 1), ("no verdict", 2)]
    page = Page((tmp_path / "report.html").read_text())
    markdown = (tmp_path / "report.md").read_text()
    for entry in report.entries:
        for text in (entry.statement, entry.source, entry.criterion, entry.because):
            assert text in page.text and text in markdown
    first, second, third, fourth = report.entries
    assert "3 settings, 3 seeds" in first.runs and re.search(r"± [\d.]+", first.measurements[0][1])
    assert (second.state, third.state, fourth.because) == ("wrong as stated", "no verdict", "not measured yet")
    assert "RuntimeError: this setting raises" in page.text and "RuntimeError: this setting raises" in markdown
    assert [tag for tag, _ in page.tags].count("svg") == 3
    assert re.findall(r"!\[\w+\]\((.*?)\)", markdown) == [f"figures/{n}.svg" for n in ("first", "second", "third")]
    assert all((tmp_path / "figures" / f"{n}.svg").is_file() for n in ("first", "second", "third"))
    versions = rows[0].versions
    for text in (versions["torch"], versions["processor"], f"{versions['cores']} cores", rows[0].started[:10]):
        assert text in page.text and text in markdown


def test_the_page_stands_alone(tmp_path: Path, rows: list[Row]) -> None:
    write(claims(), rows, tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    pointing = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("href", "src", "xlink:href")]
    assert pointing and all(v is not None and v.startswith("#") for v in pointing)
    targets = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {v.removeprefix("#") for v in pointing if v} <= targets
    assert re.findall(r"@import|url\((?!#)", text) == []


def test_the_same_rows_give_the_same_bytes(tmp_path: Path, rows: list[Row]) -> None:
    for name, given in (("a", rows), ("b", rows[::-1])):
        write(claims(), given, tmp_path / name)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    figures = [f"figures/{name}.svg" for name in ("first", "second", "third")]
    assert [f.as_posix() for f in files] == [*figures, "report.html", "report.md", "verdicts.json"]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_text_is_escaped(tmp_path: Path) -> None:
    claim = dataclasses.replace(made.make(made.number, [{"a": "<b>|"}], name="odd"), statement="<script>x</script> a|b")
    write([claim], [], tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text


def test_a_plot_that_raises_says_so_and_the_report_is_written(tmp_path: Path, rows: list[Row]) -> None:
    def plot(rows: list[Row], axes: object) -> None:
        raise KeyError("loss")

    write([dataclasses.replace(claims()[0], plot=plot)], rows, tmp_path)
    assert "no plot: KeyError" in (tmp_path / "figures" / "first.svg").read_text()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot write to"):
        write([], [], tmp_path / "file" / "deeper")


def test_all_claims_say_what_a_reader_needs() -> None:
    for claim in all_claims().values():
        for name in ("statement", "source", "criterion"):
            text = getattr(claim, name)
            assert len(text) >= 15, (claim.id, name)
            assert "\n" not in text, (claim.id, name)
        assert claim.plot is not None
        assert claim.cells(True) and claim.cells(False)
