"""Order and the JSONL reader under whatever comes."""

import json
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rpipe.data.entry import DataError
from rpipe.data.jsonl import jsonl_entries
from rpipe.data.order import Order

orders = st.builds(Order, st.integers(1, 50), st.integers(-(2**70), 2**70), st.booleans())


@given(orders, st.integers(0, 10**6))
def test_each_epoch_is_a_permutation(order, epoch):
    taken, cursor = order.take(epoch * order.size, order.size)
    assert sorted(taken) == list(range(order.size))
    assert cursor == (epoch + 1) * order.size


@given(orders, st.integers(0, 1000), st.lists(st.integers(0, 70), max_size=6))
def test_resuming_at_any_cursor_gives_the_same_sequence(order, start, parts):
    whole, end = order.take(start, sum(parts))
    pieces, at = [], start
    for n in parts:
        fresh = Order(order.size, order.seed, order.shuffle)
        taken, at = fresh.take(at, n)
        pieces += taken
    assert (pieces, at) == (whole, end)


def read(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        path.write_bytes(content)
        return list(jsonl_entries(path, "x.jsonl"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(st.sampled_from(["prompt", "messages", "answer", "reward", "other"]), json_values)
lines = (
    st.binary(max_size=30) | objects.map(lambda o: json.dumps(o).encode()) | json_values.map(lambda o: json.dumps(o).encode())
)


@settings(max_examples=300, deadline=None)
@given(st.lists(lines, max_size=4).map(b"\n".join))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"prompt": "x", "answer": 1e999}')
@example(b"\x00\r\x0b\xc2\x85")
def test_odd_lines_give_entries_or_one_line_that_names_the_file(content):
    try:
        entries = read(content)
    except DataError as error:
        assert str(error).startswith("x.jsonl:") and "\n" not in str(error)
    else:
        assert entries and all(e.answer is not None and e.prompt for e in entries)


good = st.fixed_dictionaries({"prompt": st.text(min_size=1, max_size=5), "answer": st.text(max_size=5) | st.integers(-9, 9)})


@settings(deadline=None)
@given(st.lists(good, min_size=1, max_size=3), st.data())
def test_a_torn_file_is_named_at_its_last_line_or_reads_short(entries, data):
    content = "\n".join(json.dumps(e, ensure_ascii=False) for e in entries).encode(errors="surrogatepass")
    cut = content[: data.draw(st.integers(0, len(content)))]
    last = cut.count(b"\n") + 1
    try:
        found = read(cut)
    except DataError as error:
        assert str(error).startswith((f"x.jsonl:{last}: ", "x.jsonl: holds no prompts"))
    else:
        assert [e.prompt for e in found] == [e["prompt"] for e in entries][: len(found)]
