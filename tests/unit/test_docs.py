"""Docs that a program can check are checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rpipe import config

ROOT = Path(__file__).resolve().parents[2]


def test_every_key_stands_in_the_configuration_page_with_its_default():
    from tests.unit.config_page import page

    assert (ROOT / "docs" / "configuration.md").read_text() == page(), "run: python -m tests.unit.config_page"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_committed_run_file_is_valid(path):
    config.load(path)


def test_the_readme_s_example_is_valid(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    tree = yaml.safe_load(example)
    tree["include"] = [str(ROOT / name) for name in tree["include"]]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    found = config.load(tmp_path / "mine.yaml", ["training.optimizer.learning_rate=2e-6", "run.seed=1"])
    assert found.arithmetic() in (ROOT / "README.md").read_text().replace("\n", " ")


def test_the_readme_has_no_figure_still_to_be_measured():
    assert "MEASURED" not in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_and_pictures_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_files_named_in_the_docs_exist():
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`((?:control|policy|runtime|rollout|training|data|core)/\w+\.py)`", page.read_text()):
            assert (ROOT / "rpipe" / name).exists(), f"{page.name}: {name}"
