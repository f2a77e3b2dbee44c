"""`verl-war report`: the page and the summary."""

import html.parser
import json
import re

import pytest

from tests.report.simulated import simulate
from verl_war.cli import main

SECTIONS = [
    *("Makespan of each rollout", "Critical path of step 1", "Load of the fleet", "Load and regime of each replica"),
    *("KV cache", "Prefix cache hits", "Speculation", "Held and moved", "Fit of the step time model"),
]
VOID = {"meta", "br", "img", "use", "path"}


class Checker(html.parser.HTMLParser):
    """Notes unbalanced tags and everything that a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.titles, self.fetched, self._text = [], [], [], ""

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self._text = ""
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data", "srcset", "style") and value:
                outside = not value.startswith(("#", "data:")) and (name != "style" or "url(" in value)
                self.fetched += [value] * outside

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag
        if tag in ("h3", "h2"):
            self.titles.append(self._text)

    def handle_data(self, data):
        self._text += data


def checked(path):
    text = path.read_text()
    checker = Checker()
    checker.feed(text)
    assert not checker.open and not checker.fetched
    # Names of XML's vocabularies are no addresses.
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in text and "<script" not in text and "<link" not in text
    return checker.titles


def test_the_page_shows_everything_and_needs_nothing(simulated, tmp_path, capsys):
    out = tmp_path / "pages" / "report.html"
    assert main(["report", str(simulated), "--out", str(out)]) == 0
    titles = checked(out)
    for title in SECTIONS:
        assert title in titles
    text = capsys.readouterr().out
    assert re.search(r"trajectories +16\n", text) and re.search(
        r"prefix cache hits +\d+\.\d% \(believed \d+\.\d%\)", text
    )
    assert re.search(r"speculation +\d+\.\d% accepted, \d\.\d\d tokens a draft, in \d+% of steps", text)
    assert re.search(r"last trajectories of step \d, the longest rollout:\n +\d-g\d-\d \(generating", text)
    assert text.endswith(f"page: {out}\n")


def test_many_replicas_share_maps(tmp_path):
    journal = simulate(tmp_path / "journal.jsonl", replicas=12, load=1.5, steps=1)
    assert main(["report", str(journal), "--out", str(tmp_path / "r.html")]) == 0
    assert "Load and regime of each replica" in checked(tmp_path / "r.html")
    assert "A row for each replica" in (tmp_path / "r.html").read_text()


def test_a_tiny_journal_leaves_out_what_it_does_not_tell(tiny_journal, tmp_path, capsys):
    assert main(["report", str(tiny_journal), "--out", str(tmp_path / "r.html")]) == 0
    titles = checked(tmp_path / "r.html")
    assert titles[1:] == ["Critical path of step 3", "Load of the fleet", "Load and regime of each replica",
                          "Prefix cache hits"]  # fmt: skip
    assert "speculation" not in capsys.readouterr().out


def test_nothing_finished_and_nothing_at_all(tiny_journal, tmp_path, capsys):
    lines = tiny_journal.read_text().splitlines()
    asked = next(number for number, line in enumerate(lines) if '"event": "turn"' in line)
    for count in (asked + 1, 1):
        tiny_journal.write_text("\n".join(lines[:count]) + "\n")
        assert main(["report", str(tiny_journal), "--out", str(tmp_path / "r.html")]) == 0
        checked(tmp_path / "r.html")
    assert "0, 1 still live" in capsys.readouterr().out
    assert "The journal holds no events." in (tmp_path / "r.html").read_text()


def test_metrics_alone_are_told_in_a_line_and_that_a_journal_is_missing(tmp_path, capsys):
    logged = [{"step": step, "data": {"timing_s/step": 20.0 * step, "timing_s/gen": 10.0 / step}} for step in (1, 2, 3)]
    (tmp_path / "exp.jsonl").write_text("\n".join(json.dumps(it) for it in logged) + "\n")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    text = capsys.readouterr().out
    assert "exp.jsonl: 3 steps, median step 40.0 s, median rollout 5.0 s\n" in text
    assert "no journal" in text and "custom.war.journal_path=FILE" in text


def test_a_directory_gives_all_that_is_in_it(tiny_journal, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "metrics").mkdir(parents=True)
    (run / "journal.jsonl").write_text(tiny_journal.read_text())
    (run / "journal.jsonl.10").write_text(tiny_journal.read_text())
    (run / "journal.jsonl.2").write_text(tiny_journal.read_text()[:-5])
    (run / "console.log").write_text("{not a journal}\n")
    logged = [{"step": step, "data": {"training/global_step": step, "timing_s/gen": 10.0 / step, "war/turns": 3}}
              for step in (1, 2, 3)]  # fmt: skip
    (run / "metrics" / "exp.jsonl").write_text("\n".join(json.dumps(it) for it in logged) + "\n")
    assert main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 0
    titles = checked(tmp_path / "r.html")
    journals = [title for title in titles if "journal" in title]
    assert [title.rpartition("/")[2] for title in journals] == ["journal.jsonl", "journal.jsonl.2", "journal.jsonl.10"]
    assert titles[-1] == "verl's metrics: exp.jsonl"
    assert "the last line is cut off" in capsys.readouterr().out


def test_names_from_a_run_are_text(tiny_journal, tmp_path):
    text = tiny_journal.read_text().replace('"a"', '"<script>alert(1)</script>"').replace('"r0"', '"<b>&"')
    tiny_journal.write_text(text)
    assert main(["report", str(tiny_journal), "--out", str(tmp_path / "r.html")]) == 0
    checked(tmp_path / "r.html")


def write_metric(path, value):
    path.write_text(
        f'{{"step": 1, "data": {{}}}}\n{{"step": 2, "data": {{"war/turns": 3, "timing_s/gen": {value}}}}}\n'
    )


@pytest.mark.parametrize(
    ("make", "status", "words"),
    [
        (lambda path: None, 2, "does not exist; expected a journal or the directory of a run"),
        (lambda path: path.mkdir(), 2, "holds no journal; expected a file that custom.war.journal_path made"),
        (lambda path: path.write_text("hello\n"), 1, "run:1: no JSON"),
        (lambda path: path.write_text(""), 1, "run is empty"),
        (lambda path: path.write_text('{"step": 1, "data": {}}\n{"step"\n'), 1, "run:2: expected a line of verl's"),
        (lambda path: write_metric(path, "1e400"), 1, "run:2: timing_s/gen=inf cannot be drawn; expected a finite"),
        (lambda path: write_metric(path, "-Infinity"), 1, "run:2: timing_s/gen=-inf cannot be drawn"),
        (lambda path: write_metric(path, "NaN"), 1, "run:2: timing_s/gen=nan cannot be drawn"),
        (lambda path: write_metric(path, "1" + "0" * 400), 1, "run:2: timing_s/gen=1000"),
    ],
)  # fmt: skip
def test_what_cannot_be_reported_is_said(tmp_path, capsys, make, status, words):
    make(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == status
    assert words in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_a_page_that_cannot_be_written_and_a_command_without_a_run(tiny_journal, tmp_path, capsys):
    assert main(["report", str(tiny_journal), "--out", str(tiny_journal / "r.html")]) == 2
    assert main(["report"]) == 2
    assert "name a journal or a directory of a run" in capsys.readouterr().err


def test_without_matplotlib_the_remedy_is_named(tiny_journal, monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["report", str(tiny_journal)]) == 2
    assert "pip install" in capsys.readouterr().err
