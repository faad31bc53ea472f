"""What is refused before anything starts: exit code 2, one line, and no run directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rpipe.runtime import launch


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], tree: dict[str, object]) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"run": {"dir": str(tmp_path / "run")}, **tree}))
    assert launch.train(str(path), []) == 2
    assert not (tmp_path / "run").exists()
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
    return told.err


def test_a_model_folder_that_is_not_there(tmp_path, capsys):
    tree = {"model": {"path": "/no/such/model"}, "data": {"train": {"kind": "sums"}}}
    assert "model.path = /no/such/model: no such folder" in refused(tmp_path, capsys, tree)


def test_a_data_file_that_is_not_there(tmp_path, capsys):
    tree = {"model": {"make": {}}, "data": {"train": {"kind": "jsonl", "path": str(tmp_path / "none.jsonl")}}}
    assert "none.jsonl" in refused(tmp_path, capsys, tree)


def test_a_line_that_lacks_its_answer(tmp_path, capsys):
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2 + '{"prompt": "2+2="}\n')
    tree = {"model": {"make": {}}, "data": {"train": {"kind": "jsonl", "path": str(data)}}}
    assert "train.jsonl:3" in refused(tmp_path, capsys, tree)


def test_a_mistyped_key(tmp_path, capsys):
    tree = {"model": {"make": {}}, "data": {"train": {"kind": "sums"}}, "rollout": {"max_new_token": 5}}
    assert "rollout.max_new_token: unknown key; did you mean max_new_tokens?" in refused(tmp_path, capsys, tree)
