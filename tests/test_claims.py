"""The documents say what the result files and the code say."""

import json
import shutil

import pytest

from scripts.claims import results
from scripts.claims.__main__ import DOCUMENTS, ROOT, main
from scripts.claims.marks import ClaimError, claim, rendered

COMPARISON = "recipes/baseline_comparison/README.md"


@pytest.fixture
def copy(tmp_path):
    """The documents in another place."""
    for name in DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_documents_agree_with_their_sources(capsys):
    assert main(["--check"]) == 0, f"run: python -m scripts.claims\n{capsys.readouterr().out}"


@pytest.mark.parametrize(
    ("document", "true", "false"),
    [
        ("README.md", "3.7x / 2.6x / 1.9x / 1.3x", "3.7x / 2.9x / 1.9x / 1.3x"),
        ("README.md", "`==0.9.1`", "`==0.9.2`"),
        ("verl_war/METRICS.md", "| `war/turns` | count |", "| `war/turns` | s |"),
        (COMPARISON, "2.38 (2.12 - 2.55)", "2.48 (2.12 - 2.55)"),
        (COMPARISON, "slower in 5 of 6", "slower in 4 of 6"),
        ("recipes/baseline_comparison/gpu/README.md", "| 665 |", "| 655 |"),
    ],
)
def test_a_changed_number_is_found_and_written_back(copy, capsys, document, true, false):
    replace(copy / document, true, false)
    assert main(["--check"], copy) == 1
    removed, added = _difference(capsys.readouterr().out)
    assert len(removed) == len(added) == 1 and false in removed[0] and true in added[0]
    assert false in (copy / document).read_text(), "--check changes nothing"
    assert main([], copy) == 0
    assert capsys.readouterr().out == f"wrote {document}\n"
    assert (copy / document).read_text() == (ROOT / document).read_text()
    assert main(["--check"], copy) == 0


def _difference(diff):
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    return [line for line in lines if line.startswith("-")], [line for line in lines if line.startswith("+")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\nof <!-- r: speedupp sweep_peaked war 1 -->1x<!-- /r -->", "README.md:2: .*'speedupp' is unknown; expected"),
        ("of <!-- r: -->1x<!-- /r -->", "README.md:1: .*'' is unknown"),
        ("of <!-- r: seeds h100_8b -->5", "README.md:1: <!-- r: seeds h100_8b --> is not closed"),
        ("a <!-- r: seeds h100_8b -->5\n\nb <!-- r: steps off/off -->1<!-- /r -->", ":1: .*h100_8b --> is not closed"),
        ("of 5<!-- /r -->", "README.md:1: <!-- /r --> has no mark that opens it"),
        ("of <!-- r: seeds -->5<!-- /r -->", "seeds -->: missing a required argument: 'folder'; expected the words of"),
        ("of <!-- r: seeds h100_9b -->5<!-- /r -->", "h100_9b/simulate.json is missing; make it again"),
        ("of <!-- r: ratio h100_8b war 7 -->5<!-- /r -->", "has no .*7.0, 'war'"),
        ("of <!-- r: ratio h100_8b war many -->5<!-- /r -->", "war many -->: could not convert"),
        ("of <!-- r: fleets -->5<!-- /r -->", "makes a table; put both marks on lines of their own"),
        ("* <!-- r: seeds h100_8b -->5<!-- /r --> seeds", "begins a line"),
    ],
)
def test_marks_that_cannot_be(text, words):
    with pytest.raises(ClaimError, match=words):
        rendered("README.md", text)


def test_a_wrong_mark_is_the_status_of_the_command(copy, capsys):
    replace(copy / COMPARISON, "<!-- r: fleets -->", "<!-- r: fleet -->")
    before = (copy / COMPARISON).read_text()
    for arguments in (["--check"], []):
        assert main(arguments, copy) == 2
        assert f"{COMPARISON}:" in (error := capsys.readouterr().err) and "'fleet' is unknown" in error
    assert (copy / COMPARISON).read_text() == before


def test_result_files_decide(tmp_path, monkeypatch, capsys):
    shutil.copytree(results.RESULTS, tmp_path / "results")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    file = tmp_path / "results" / "one_slow" / "simulate.json"
    report = json.loads(file.read_text())
    row = next(row for row in report["summary"] if row["policy"] == "war")
    row["ratio_mean"] = 9.87
    file.write_text(json.dumps(report))
    assert main(["--check"]) == 1
    assert f"9.87 ({row['ratio_least']:.2f} - {row['ratio_most']:.2f})" in capsys.readouterr().out
    file.unlink()
    assert main(["--check"]) == 2
    assert f"{file} is missing" in capsys.readouterr().err
    file.write_text("{")
    assert main(["--check"]) == 2
    assert f"{file} is no JSON" in capsys.readouterr().err


def test_both_kinds_of_marks():
    claims = {"word": lambda: "new", "table": lambda rows: "\n".join(["|a|"] * int(rows))}
    text = "A <!-- r: word -->old<!-- /r -->.\n<!-- r: table 2 -->\n<!-- /r -->\n<!-- a note -->\n"
    made = "A <!-- r: word -->new<!-- /r -->.\n<!-- r: table 2 -->\n|a|\n|a|\n<!-- /r -->\n<!-- a note -->\n"
    assert rendered("page.md", text, claims) == made
    assert rendered("page.md", made, claims) == made


def test_two_claims_of_one_name_are_refused():
    def seeds():
        return ""

    with pytest.raises(ValueError, match="'seeds' is taken"):
        claim(seeds)
