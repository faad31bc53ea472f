"""Prompts: what a source gives, and how it says that its input is wrong."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rpipe import config
from rpipe.core.types import Prompt
from rpipe.data.order import Order
from rpipe.data.prompts import DataError, load_data, load_prompts
from rpipe.data.sums import held_out, solution
from rpipe.data.supervised import supervised, supervised_batches
from rpipe.rollout.reward_functions import last_integer

SAMPLES = Path(__file__).parents[1] / "data"


class Characters:
    """A tokenizer whose ids are code points."""

    chat_template = "yes"

    def __call__(self, texts, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [[ord(c) for c in text] for text in texts]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


class Plain(Characters):
    chat_template = None


def source(**keys):
    return config.Source(**{"kind": "jsonl", "path": "prompts.jsonl", **keys})


def load(folder=SAMPLES, tokenizer=None, most=100, key="data.train", **keys):
    return load_prompts(source(**keys), tokenizer or Characters(), most, folder, key)


def sums(size=100, seed=0, key="data.train", **options):
    return load(kind="sums", size=size, seed=seed, key=key, options=options, reward="last_integer")


def refused(folder=SAMPLES, **keys):
    with pytest.raises(DataError) as caught:
        load(folder, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ids(text):
    return tuple(ord(c) for c in text)


def test_a_jsonl_file_gives_its_prompts_in_order_with_line_numbers():
    found = load()
    assert list(found) == [
        Prompt("prompts.jsonl:1", ids("1+1="), "1+1=", "2", "exact_match"),
        Prompt(
            "prompts.jsonl:3",
            ids("<system>Add.<user>2+3=?<assistant>"),
            "<system>Add.<user>2+3=?<assistant>",
            "5",
            "exact_match",
            {"task": "sums"},
        ),
        Prompt("prompts.jsonl:4", ids("x"), "x", "1", "reward_samples:length", {"solution": "1"}),
    ]
    assert found.rewards == {"exact_match": "data.train.reward", "reward_samples:length": "prompts.jsonl:4"}


def test_template_and_chat_wrap_a_prompt(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": 2, "level": 3}\n')
    found = load(tmp_path, template="[{level}] {prompt}=", chat=True)
    assert found[0].text == "<user>[3] 1+1=<assistant>"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x"}', 'prompts.jsonl:2: "answer" is missing; wanted: prompt or messages, answer'),
        (b'{"answer": "x"}', 'prompts.jsonl:2: neither of "prompt" and "messages" given; wanted: prompt or messages, answer'),
        (
            b'{"prompt": "x", "messages": [], "answer": "x"}',
            'prompts.jsonl:2: both of "prompt" and "messages" given; wanted: prompt or messages, answer',
        ),
        (b'{"prompt": 3, "answer": "x"}', 'prompts.jsonl:2: "prompt" is number; wanted: text'),
        (b'{"prompt": "", "answer": "x"}', 'prompts.jsonl:2: "prompt" is empty; wanted: text'),
        (b'{"prompt": "x", "answer": [1]}', 'prompts.jsonl:2: "answer" is list; wanted: text or a number'),
        (b'{"prompt": "x", "answer": true}', 'prompts.jsonl:2: "answer" is true or false; wanted: text or a number'),
        (b'{"prompt": "x", "answer": "1", "reward": 1}', 'prompts.jsonl:2: "reward" is number; wanted: text'),
        (
            b'{"messages": "x", "answer": "1"}',
            'prompts.jsonl:2: "messages" is text; wanted: a list of {"role": text, "content": text}',
        ),
        (
            b'{"messages": [{"role": "user"}], "answer": "1"}',
            'prompts.jsonl:2: "messages"[0].content is null or missing; wanted: text',
        ),
        (b"[1]", "prompts.jsonl:2: a JSON list; wanted: a JSON object with prompt or messages, answer"),
        (
            b'{"prompt": "x", "ans',
            "prompts.jsonl:2: not JSON at column 17: Unterminated string starting at; wanted: one JSON object a line",
        ),
        (b'{"prompt": "\xff"}', "prompts.jsonl:2: not UTF-8 at byte 13 of the line; wanted: a JSON object in UTF-8"),
        (
            b'{"prompt": "x\\ud800", "answer": "1"}',
            'prompts.jsonl:2: "prompt" holds half a surrogate pair, which no tokenizer reads; wanted: text',
        ),
        (
            b'{"prompt": "x", "answer": NaN}',
            "prompts.jsonl:2: not JSON: NaN is not a JSON number; wanted: one JSON object a line",
        ),
        (
            b'{"prompt": "x", "answer": ' + b"1" * 5000 + b"}",
            "prompts.jsonl:2: not JSON: a number of 5000 digits; give it as text; wanted: one JSON object a line",
        ),
        (
            b'{"prompt": "' + b"x" * 101 + b'", "answer": "1"}',
            "prompts.jsonl:2: the prompt has 101 tokens; wanted: at most data.max_prompt_tokens = 100",
        ),
    ],
)
def test_a_bad_line_is_named_with_file_and_line(tmp_path, line, message):
    (tmp_path / "prompts.jsonl").write_bytes(b'{"prompt": "good", "answer": "1"}\n' + line + b"\n")
    assert refused(tmp_path) == message


def test_a_bad_file_is_named(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n \n")
    assert refused(tmp_path) == "prompts.jsonl: holds no prompts; wanted: one JSON object a line"
    assert refused(tmp_path, path="none.jsonl") == "none.jsonl: cannot be read: No such file or directory"
    assert refused(tmp_path, path=".") == ".: cannot be read: Is a directory"


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path):
    (tmp_path / "prompts.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "x", "answer": "1"}\r\n\r\n{"prompt": "y", "answer": "1"}'
    )
    assert [p.prompt_id for p in load(tmp_path)] == ["prompts.jsonl:1", "prompts.jsonl:3"]


def test_a_template_that_names_no_field_says_which_there_are():
    assert refused(template="{question}") == (
        "prompts.jsonl:1: data.train.template = '{question}': KeyError: 'question'; fields here: prompt, answer"
    )
    assert refused(template="{", key="data.held_out").startswith("prompts.jsonl:1: data.held_out.template = '{': ValueError: ")


def test_messages_want_a_chat_template():
    assert refused(tokenizer=Plain()).startswith('prompts.jsonl:3: "messages" wants a chat template, and this model')
    assert refused(tokenizer=Plain(), chat=True).startswith("data.train.chat wants a chat template")


def test_the_reasoning_gym_reward_wants_reasoning_gym_prompts():
    assert refused(reward="reasoning_gym") == (
        "data.train.reward = reasoning_gym: only prompts of kind reasoning_gym have its scorer"
    )


def test_a_sums_solution_shows_every_partial_sum_and_ends_with_the_answer():
    assert solution([17, 5]) == "22"
    assert solution([17, 5, 48]) == "22+48=70"
    assert solution([1, 2, 3, 4]) == "3+3=6+4=10"
    for prompt in sums(min_terms=2, max_terms=6, max_number=99):
        assert prompt.answer == str(sum(map(int, prompt.text.rstrip("=").split("+"))))
        assert last_integer("", prompt.metadata["solution"], prompt.answer, prompt.metadata) == 1.0


def test_sums_are_distinct_the_same_every_time_and_differ_by_seed():
    first = [p.text for p in sums(500)]
    assert len(set(first)) == 500
    assert first == [p.text for p in sums(500)]
    assert first != [p.text for p in sums(500, seed=1)]
    # a run of today must be repeatable next year, on another Python and numpy
    assert hashlib.sha256("".join(first).encode()).hexdigest()[:16] == "778f506013abde68"


def test_held_out_sums_are_never_trained_on_whatever_the_seeds():
    data = config.Data(
        train=source(kind="sums", size=2000, options={"max_number": 40}),
        held_out=source(kind="sums", size=300, options={"max_number": 40}),
    )
    train, held = load_data(data, Characters(), SAMPLES)
    assert (len(train), len(held), held.note) == (2000, 300, "")
    assert not {p.text for p in train} & {p.text for p in held}
    assert all(held_out(p.text) for p in held)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_terms": 1}, "data.train.options.max_terms = 1; wanted: a whole number of at least 2"),
        ({"max_number": "9"}, "data.train.options.max_number = '9'; wanted: a whole number of at least 1"),
        ({"terms": 2}, "data.train.options.terms: unknown; known for sums: min_terms, max_terms, max_number, split"),
        ({"split": "test"}, "data.train.options.split = 'test'; wanted: train, held_out or all"),
    ],
)
def test_options_of_sums_are_checked(options, message):
    assert refused(kind="sums", options=options) == message


def test_more_sums_than_there_are_is_refused_with_their_number():
    message = refused(kind="sums", size=100, options={"max_terms": 2, "max_number": 3, "split": "all"})
    assert message.startswith("data.train.size = 100: these options give only about 9 distinct sums for split all;")


def test_held_out_prompts_that_training_has_are_left_out_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "{c}", "answer": "1"}}\n' for c in "abc"))
    (tmp_path / "b.jsonl").write_text("".join(f'{{"prompt": "{c}", "answer": "1"}}\n' for c in "cde"))
    data = config.Data(train=source(path="a.jsonl"), held_out=source(path="b.jsonl"))
    _, held = load_data(data, Characters(), tmp_path)
    assert [p.text for p in held] == ["d", "e"]
    assert held.note == "data.held_out: 1 of 3 prompts are in data.train too and are left out"
    with pytest.raises(DataError, match=r"^data.held_out: every one of its 3 prompts is in data.train too"):
        load_data(config.Data(train=source(path="a.jsonl"), held_out=source(path="a.jsonl")), Characters(), tmp_path)


def gym(name="chain_sum", size=4, seed=0, **options):
    return load(kind="reasoning_gym", name=name, size=size, seed=seed, options=options, reward="reasoning_gym", most=10_000)


def test_reasoning_gym_prompts_are_the_same_under_any_hash_seed():
    # isomorphic_strings follows it otherwise, as do knight_swap, polynomial_multiplication and ransom_note
    code = (
        "from pathlib import Path; from rpipe import config; from rpipe.data.prompts import load_prompts\n"
        "from test_data import Characters\n"
        "s = config.Source(kind='reasoning_gym', name='isomorphic_strings', size=3)\n"
        "print([p.text for p in load_prompts(s, Characters(), 10000, Path())])\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def test_neighbouring_reasoning_gym_seeds_share_no_entries():
    texts = [{p.text for p in gym(size=50, seed=s, min_digits=4, max_digits=4)} for s in (0, 1)]
    assert not texts[0] & texts[1]


def test_reasoning_gym_says_what_it_does_not_know():
    with pytest.raises(DataError, match=r"^data.train: name = chain_sums: no such reasoning_gym generator; close: chain_sum"):
        gym("chain_sums")
    with pytest.raises(DataError, match=r"^data.train: reasoning_gym chain_sum refuses options = \{'colour': 1\}: TypeError: "):
        gym(colour=1)
    with pytest.raises(DataError, match=r"game_of_life_halting: this generator's scorer gives full marks to '~ no answer ~'"):
        gym("game_of_life_halting")


def test_an_order_covers_every_prompt_each_epoch_and_is_the_same_for_ever():
    taken, cursor = Order(5, 7).take(0, 12)
    assert sorted(taken[:5]) == sorted(taken[5:10]) == [0, 1, 2, 3, 4]
    assert taken[:5] != taken[5:10]
    assert cursor == 12
    assert taken == [4, 3, 2, 1, 0, 1, 4, 3, 2, 0, 0, 3]
    assert Order(3, 7, shuffle=False).take(2, 5) == ([2, 0, 1, 2, 0], 7)


def test_supervised_batches_train_the_solution_and_the_end_of_sequence():
    prompts = [Prompt("a", ids("1+2="), "1+2=", "3", "exact_match", {"solution": "3"})]
    prompts += [Prompt("b", ids("1+2+3="), "1+2+3=", "6", "exact_match", {"solution": "3+3=6"})]
    assert supervised(prompts, Characters(), 0) == [([*ids("1+2=")], [*ids("3"), 0]), ([*ids("1+2+3=")], [*ids("3+3=6"), 0])]
    batches = list(supervised_batches(prompts, Characters(), 0, sequences_per_step=3, steps=4, seed=0))
    assert [b.count for b in batches] == [3, 3, 3, 3]
    for batch in batches:
        assert batch.logprobs is None
        assert batch.advantages.tolist() == [1, 1, 1]
        at = 0
        for length, prompt_length in zip(batch.lengths, batch.prompt_lengths):
            row = slice(at, at + length)
            text = "".join(map(chr, batch.token_ids[row]))
            assert text in ("1+2=3\0", "1+2+3=3+3=6\0")
            assert batch.loss_mask[row].tolist() == [0] * prompt_length + [1] * (length - prompt_length)
            assert text[:prompt_length].endswith("=") and "=" not in text[: prompt_length - 1]
            at += length
        assert at == batch.tokens and batch.token_ids.dtype == np.int32


def test_a_warm_up_without_solutions_names_the_prompt():
    with pytest.raises(DataError, match=r'^x:1: model.warm_up wants a "solution"'):
        supervised([Prompt("x:1", (1,), "", "1", "exact_match")], Characters(), 0)


def test_reasoning_gym_works_where_pycosat_could_not_be_built(monkeypatch):
    """It has no wheel; on a machine without a compiler only the puzzles that need it must fail, and say why."""
    import importlib.util
    import sys

    from rpipe.data import reasoning_gym_source as source

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "pycosat" else real(name, *a))
    for name in [m for m in sys.modules if m.split(".")[0] in ("pycosat", "reasoning_gym")]:
        monkeypatch.delitem(sys.modules, name)
    source._import_reasoning_gym()
    with pytest.raises(ImportError, match="wants a C compiler"):
        sys.modules["pycosat"].solve([[1]])
    monkeypatch.delitem(sys.modules, "pycosat")
