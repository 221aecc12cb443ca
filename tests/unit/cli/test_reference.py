"""`config list` and the two generated reference pages are complete, and the pages are current."""

import re
import subprocess
import sys

import pytest

from mlperf_bert.__main__ import COMMANDS, main, make_parser
from mlperf_bert.config.files import load_config
from mlperf_bert.config.settings import all_settings
from support import CONFIGS, REPOSITORY, refusal

PAGES = REPOSITORY / "docs" / "reference"


@pytest.fixture
def printed(monkeypatch, capsys):
    """What tools/reference_pages.py prints."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    import reference_pages

    def of(part):
        monkeypatch.setattr(sys, "argv", ["reference_pages.py", part])
        capsys.readouterr()
        assert reference_pages.main() == 0
        return capsys.readouterr().out

    return of


@pytest.mark.parametrize("part", ["settings", "commands"])
def test_the_page_is_current(part, printed):
    page = (PAGES / f"{part}.md").read_text("utf-8")
    block = re.search(r"<!-- made by: python (\S+) (\w+) -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert block is not None and block[2] == part, "run: python tools/docs_tables.py"
    assert block[3] == printed(part).strip("\n") + "\n", "run: python tools/docs_tables.py"


def test_every_setting_has_a_meaning_and_is_on_the_page(printed):
    page = printed("settings")
    parts = dict(re.findall(r"^## \[(\w+)\]\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert len(all_settings()) > 60
    for setting in all_settings().values():
        assert re.fullmatch(r"[A-Z'].+\.", setting.meaning), setting.name
        assert f"| `{setting.field}` | " in parts[setting.section], setting.name
    meanings = [setting.meaning for setting in all_settings().values()]
    assert len(set(meanings)) == len(meanings)


def test_every_command_is_on_the_page(printed):
    headings = re.findall(r"^##+ (.+)$", printed("commands"), re.MULTILINE)
    assert [each for each in headings if " " not in each] == list(COMMANDS)
    for name in ("config list", "bench transformers", "plan cluster", "squad compare"):
        assert name in headings
        make_parser(name.split())


def listed(capsys, *names):
    capsys.readouterr()
    assert main(["config", "list", *names]) == 0
    return capsys.readouterr().out


def test_settings_are_listed_in_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    everything = listed(capsys)
    assert max(map(len, everything.splitlines())) <= 80
    assert len(re.findall(r"^  \w+ = ", everything, re.MULTILINE)) == len(all_settings())
    section = listed(capsys, "optim")
    assert section.startswith("[optim]\n  name = (required)\n") and section in everything
    for name in ("learning_rate", "optim.learning_rate"):
        assert listed(capsys, name) == (
            "[optim]\n  learning_rate = (required)\n"
            "      Highest learning rate, which is reached at the end of the warm-up.\n"
            "      Allowed: a number of at least 0\n"
        )
    assert "did you mean optim.learning_rate?" in refusal(
        capsys, "config", "list", "optim.learningrate"
    )


def test_what_config_show_prints_is_a_config_to_start_from(capsys, tmp_path):
    for path in sorted(CONFIGS.glob("*.toml")):
        capsys.readouterr()
        assert main(["config", "show", path.stem]) == 0
        (tmp_path / "my.toml").write_text(capsys.readouterr().out)
        assert load_config(tmp_path / "my.toml") == load_config(path)


def test_the_scripts_help_says_where_settings_are():
    done = subprocess.run(
        [REPOSITORY / "run_and_time.sh", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Train a model") and "shellcheck" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    for command in re.findall(
        r"bin/mlperf_bert (config (?:list|show).*?)(?: {2,}| > )", done.stdout
    ):
        assert main(command.split()) == 0
    for words in (
        "config list  ",
        "config show cpu_tiny > my.toml",
        "--set optim.learning_rate=1e-3",
    ):
        assert words in done.stdout
