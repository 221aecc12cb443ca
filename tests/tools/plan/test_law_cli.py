"""`mlperf_bert plan law` as a user meets it: filters, refusals, hostile tables."""

import json
from pathlib import Path

import pytest

from bert_tools.plan.entries import COLUMNS
from mlperf_bert.__main__ import main
from support import TOOLS

HEADER = ",".join(COLUMNS)
ROWS = (
    "2.1,Acme,small,closed,Example A1,8,20.0,0,448,2.5,,2083,260.4,10",
    "2.1,Acme,large,closed,Example A1,64,4.0,1,3072,2.8,,11667,182.3,10",
    "3.0,Other,larger,open,Example B1,512,1.0,0,4096,3.0,,50000,97.7,10",
    "3.0,Other,lost,open,Example B1,1024,,,,,,,,",
    "10.0,Other,unknown,closed,N/A,,5.0,0,448,2.5,,8333,,10",
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "own.csv"
    path.write_text("\n".join(["# a comment", HEADER, *ROWS, ""]))
    return path


def test_filters(capsys: pytest.CaptureFixture[str], table: Path) -> None:
    for conditions, systems in (
        ((), ["small", "large", "larger"]),
        (("round=2.1",), ["small", "large"]),
        (("submitter=ACME", "accelerator~example"), ["small", "large"]),
        (("accelerators>=64",), ["large", "larger"]),
        (("accelerators < 100",), ["small", "large"]),
        (("division!=open", "failed_runs>=0"), ["small", "large"]),
        (("round<=3.0",), ["small", "large", "larger"]),  # as numbers: 10.0 is not among them
        (("global_batch_size<=4096", "system~l"), ["small", "large", "larger"]),
        (("samples>2600000",), ["large", "larger"]),
        (("time_min!=4",), ["small", "larger"]),
    ):
        words = [word for each in conditions for word in ("--filter", each)]
        assert main(["plan", "law", str(table), *words, "--no-plot", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert [each["system"] for each in answer["entries"]] == systems
        assert answer["schema_version"] == 1


def test_what_has_no_time_or_size_is_named(
    capsys: pytest.CaptureFixture[str], table: Path, tmp_path: Path
) -> None:
    assert main(["plan", "law", str(table), "--at", "100000"]) == 0
    text = capsys.readouterr().out
    assert "left out: 3.0 Other lost: no time in its source" in text
    assert "left out: 10.0 Other unknown: no number of accelerators in its source" in text
    assert "100,000" in text
    assert (tmp_path / "law.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for contents, message in (
        ("", "holds no entry"),
        (HEADER, "holds no entry"),
        ("a,b\n1,2\n", "line 1: is 'a,b', not the column names"),
        (f"{HEADER}\n{ROWS[0]},9\n", "line 2: has 15 cells, not 14"),
        (f'{HEADER}\n"{ROWS[0]}\n', "line 2: is no line of a CSV file"),
        (f"{HEADER}\n{ROWS[0].replace('small', '')}\n", "line 2: names no system"),
        (f"{HEADER}\n{ROWS[0].replace('small', 's' * 300)}\n", "a cell of 300 characters"),
        (f"{HEADER}\n{ROWS[0].replace('20.0', 'nan')}\n", "time_min is 'nan'"),
        (f"{HEADER}\n{ROWS[0].replace('20.0', '-1')}\n", "time_min is '-1'"),
        (f"{HEADER}\n{ROWS[0].replace('20.0', '1e400')}\n", "time_min is '1e400'"),
        (f"{HEADER}\n{ROWS[0].replace(',8,', ',8.5,')}\n", "accelerators is '8.5'"),
    ):
        (tmp_path / "own.csv").write_text(contents)
        assert main(["plan", "law", str(tmp_path / "own.csv"), "--no-plot"]) == 2
        assert message in capsys.readouterr().err


def test_a_table_as_spreadsheets_save_it(capsys: pytest.CaptureFixture[str], table: Path) -> None:
    """With UTF-8's mark before the first line, and Windows' line ends."""
    table.write_bytes(b"\xef\xbb\xbf" + table.read_bytes().replace(b"\n", b"\r\n"))
    assert main(["plan", "law", str(table), "--no-plot", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["entries"]) == 3


def test_a_mix_of_divisions_is_said(capsys: pytest.CaptureFixture[str], table: Path) -> None:
    assert main(["plan", "law", str(table), "--no-plot"]) == 0
    assert "1 of 3 entries: the open division" in capsys.readouterr().out
    assert main(["plan", "law", str(table), "--no-plot", "--filter", "division=closed"]) == 0
    assert "open division" not in capsys.readouterr().out


def test_two_entries_move_the_exponent_of_the_whole_shipped_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As docs/scaling.md says; they took 157 M samples each."""
    answers = []
    for words in ((), ("--filter", "samples<100000000")):
        assert main(["plan", "law", "--no-plot", "--json", *words]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert len(answers[0]["entries"]) - len(answers[1]["entries"]) == 2
    assert [round(each["exponent"], 3) for each in answers] == [-0.682, -0.752]


def test_names_that_no_terminal_should_show_are_written_out(
    capsys: pytest.CaptureFixture[str], table: Path
) -> None:
    """Bytes that are no UTF-8, and an escape."""
    name = "x\udcff\x1b[31m"
    assert main(["plan", "law", str(table.rename(f"{name}.csv")), "--out", f"{name}.png"]) == 0
    assert main(["plan", "suggest", "--nodes", "1", "--gpus", "8", "--out", f"{name}.toml"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert all(line.isprintable() for line in lines)
    assert r"picture: x\udcff\x1b[31m.png" in lines and r"config: x\udcff\x1b[31m.toml" in lines


def test_the_shipped_table_says_where_it_is_from() -> None:
    text = (TOOLS / "plan" / "published_results.csv").read_text("ascii")
    comment = [line for line in text.split("\n") if line.startswith("#")]
    assert any("github.com/mlcommons" in line for line in comment)
    assert text.count("\n") == len(comment) + 1 + 348
