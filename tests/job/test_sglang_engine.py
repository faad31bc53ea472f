"""Does SGLang, as a child of this process, keep the promises of the Engine protocol?

One tiny random Qwen3 and one engine serve nearly all of it. The tests change weights, so each that needs known ones says so
by asking for `fresh` (the model's own weights, sent again).
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from rpipe.config import dump, parse
from rpipe.rollout import sglang_engine, sglang_server
from rpipe.rollout.engine import Chunk, EngineError, Sampling, TensorSpec, TurnRequest
from rpipe.rollout.sglang_engine import SglangEngine
from rpipe.rollout.sglang_server import free_port
from rpipe.runtime import child
from rpipe.runtime.side_group import leave, side_group, weights_group

pytestmark = pytest.mark.timeout(400)  # an engine starts in 13 s on two quiet cores, and in minutes on busy ones
EOS, VOCABULARY = 1, 128
T = TypeVar("T")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=False, eos_token_id=EOS,
        pad_token_id=0, bos_token_id=None, initializer_range=0.15,
    )  # fmt: skip
    net = Qwen3ForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("model")
    net.save_pretrained(path)  # no tokenizer: ids are all an engine gets
    return SimpleNamespace(net=net, path=path)


def make(model: SimpleNamespace, logs: Path, index: int = 0, **engine: Any) -> SglangEngine:
    tree = {
        "model": {"path": str(model.path)},
        "data": {"train": {"kind": "sums"}},
        "cluster": {"rollout_ranks": engine.get("tp", 1)},
        "engine": {"max_running": 16, "kv_tokens": 16384, "stream_interval_tokens": 8, "start_deadline_s": 300.0, **engine},
        "limits": {"collective_s": 60.0},
    }
    return SglangEngine(parse(tree, "test"), index, model.path, logs)


class Served:
    """An engine with the event loop that its connection lives in."""

    def __init__(self, engine: SglangEngine, net: Qwen3ForCausalLM) -> None:
        self.engine, self.net = engine, net
        self.loop = asyncio.new_event_loop()
        self.group: dist.ProcessGroup | None = None
        self.version = 0
        self(engine.start(), 310)

    def __call__(self, work: Coroutine[Any, Any, T], bound_s: float = 120) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, bound_s))

    def send(self, tensors: dict[str, torch.Tensor], buckets: int = 2) -> int:
        """Broadcast weights as the trainer does; returns their version."""
        self.version += 1
        self(self._send(list(tensors.items()), buckets, self.version))
        return self.version

    async def _send(self, tensors: list[tuple[str, torch.Tensor]], buckets: int, version: int) -> None:
        if self.group is None:
            port, world = free_port(), 1 + self.engine.config.engine.tp
            name = weights_group(self.engine.index, 0)
            meet = asyncio.to_thread(side_group, "127.0.0.1", port, world, 0, name, "gloo", 60.0)
            self.group, _ = await asyncio.gather(meet, self.engine.join_update_group("127.0.0.1", port, world, "gloo", name))
        await self.engine.begin_update()
        for i in range(buckets):
            bucket = tensors[i::buckets]
            specs = [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in bucket]
            await asyncio.gather(asyncio.to_thread(self._broadcast, bucket), self.engine.receive_bucket(specs))
        await self.engine.end_update(version)

    def _broadcast(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in bucket:
            dist.broadcast(tensor.detach().contiguous(), src=0, group=self.group)

    def leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            leave(group)

    def close(self) -> None:
        self(self.engine.stop())
        self.leave()
        self.loop.close()


@pytest.fixture(scope="module")
def served(model: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    it = Served(make(model, tmp_path_factory.mktemp("logs")), model.net)
    yield it
    it.close()


@pytest.fixture
def fresh(served: Served) -> Served:
    """With the model's own weights and an empty prefix cache."""
    if served.version:
        served.send(dict(served.net.state_dict()))
    else:
        served(served.engine.flush_cache())
    return served


def request(name: str, prompt: list[int], limit: int, priority: int = 0, **sampling: Any) -> TurnRequest:
    return TurnRequest(name, prompt, Sampling(max_new_tokens=limit, **sampling), priority)


async def collect(engine: SglangEngine, turn: TurnRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(turn)]


def ids(chunks: list[Chunk]) -> list[int]:
    return [i for c in chunks for i in c.token_ids]


def logprobs(chunks: list[Chunk]) -> list[float]:
    return [p for c in chunks for p in c.logprobs]


def prompts(count: int, length: int = 9, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, VOCABULARY) for _ in range(length)] for _ in range(count)]


def given(net: Qwen3ForCausalLM, prompt: list[int], output: list[int], temperature: float) -> torch.Tensor:
    """transformers' log-probs of `output` after `prompt`."""
    with torch.no_grad():
        logits = net(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(output)[:, None])[:, 0]


def test_greedy_tokens_are_those_of_transformers(fresh: Served) -> None:
    async def work() -> list[list[Chunk]]:
        turns = [request(f"g{i}", p, 24, temperature=0.0, ignore_eos=True) for i, p in enumerate(prompts(6))]
        return list(await asyncio.gather(*(collect(fresh.engine, t) for t in turns)))

    for prompt, chunks in zip(prompts(6), fresh(work()), strict=True):
        wanted = fresh.net.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=24,
            min_new_tokens=24, do_sample=False, eos_token_id=VOCABULARY + 1, pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert ids(chunks) == wanted
        assert chunks[-1].finish == "length"


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_transformers_at_the_temperature(fresh: Served, temperature: float) -> None:
    for i, prompt in enumerate(prompts(4)):
        chunks = fresh(collect(fresh.engine, request(f"l{i}", prompt, 40, temperature=temperature, ignore_eos=True)))
        assert len(ids(chunks)) == len(logprobs(chunks)) == 40
        gap = (given(fresh.net, prompt, ids(chunks), temperature) - torch.tensor(logprobs(chunks))).abs().max()
        assert gap < 1e-4


def test_top_p_does_not_change_the_logprobs_that_are_said(fresh: Served) -> None:
    prompt = prompts(1)[0]
    chunks = fresh(collect(fresh.engine, request("p", prompt, 20, temperature=1.0, top_p=0.5, top_k=20, ignore_eos=True)))
    gap = (given(fresh.net, prompt, ids(chunks), 1.0) - torch.tensor(logprobs(chunks))).abs().max()
    assert gap < 1e-4


def test_chunks_are_small_and_join_to_the_whole_response(fresh: Served) -> None:
    chunks = fresh(collect(fresh.engine, request("c", prompts(1)[0], 100, temperature=0.0, ignore_eos=True)))
    assert len(ids(chunks)) == 100
    assert [c.finish for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) >= 5 and all(0 < len(c.token_ids) == len(c.logprobs) for c in chunks)
    one = fresh(collect(fresh.engine, request("c", prompts(1)[0], 1, temperature=0.0, ignore_eos=True)))
    assert (ids(one), one[-1].finish) == (ids(chunks)[:1], "length")


def test_eos_ends_a_response_and_is_part_of_it(fresh: Served) -> None:
    head = torch.zeros_like(fresh.net.lm_head.weight)
    fresh.send({"lm_head.weight": head}, buckets=1)  # all logits are equal: one token in 128 is EOS

    async def work() -> list[list[Chunk]]:
        return list(await asyncio.gather(*(collect(fresh.engine, request(f"e{i}", [5], 200)) for i in range(64))))

    results = fresh(work())
    stopped = [ids(c) for c in results if c[-1].finish == "stop"]
    assert all(r[-1] == EOS and EOS not in r[:-1] for r in stopped) and len(stopped) > 30
    assert all(EOS not in ids(c) and len(ids(c)) == 200 for c in results if c[-1].finish == "length")
    assert all(abs(p + 4.852) < 1e-3 for c in results for p in logprobs(c))  # log(1/128), of EOS too
    by_id = fresh(collect(fresh.engine, request("k", [5], 200, stop_token_ids=tuple(range(2, 60)))))
    assert by_id[-1].finish == "stop" and EOS <= ids(by_id)[-1] < 60

    with torch.no_grad():
        head[EOS] = 10 * fresh.net.model(torch.tensor([[5]])).last_hidden_state[0, -1]
    fresh.send({"lm_head.weight": head}, buckets=1)
    first = fresh(collect(fresh.engine, request("f", [5], 20, temperature=0.0)))
    assert (ids(first), first[-1].finish, len(logprobs(first))) == ([EOS], "stop", 1)
    assert len(ids(fresh(collect(fresh.engine, request("f", [5], 20, temperature=0.0, ignore_eos=True))))) == 20


def test_abort_keeps_the_prefix_and_spares_requests_with_similar_names(fresh: Served) -> None:
    prompt = prompts(1)[0]
    whole = fresh(collect(fresh.engine, request("a", prompt, 900, temperature=0.0, ignore_eos=True)))

    async def work() -> tuple[list[Chunk], list[Chunk]]:
        other = asyncio.create_task(collect(fresh.engine, request("a1", prompt, 300, ignore_eos=True)))
        got = []
        async for chunk in fresh.engine.generate(request("a", prompt, 900, temperature=0.0, ignore_eos=True)):
            got.append(chunk)
            if chunk.finish is None and len(ids(got)) > 30:
                await fresh.engine.abort("a")
        await fresh.engine.abort("nobody")
        return got, await other

    got, other = fresh(work())
    assert got[-1].finish == "abort" and 30 < len(ids(got)) < 900
    assert ids(got) == ids(whole)[: len(ids(got))] and len(logprobs(got)) == len(ids(got))
    assert len(ids(other)) == 300 and other[-1].finish == "length"


def test_a_request_aborted_in_the_queue_ends_empty(fresh: Served) -> None:
    async def work() -> list[Chunk]:
        turns = [request(f"f{i}", [5, 6], 500, ignore_eos=True) for i in range(16)]
        filling = [asyncio.create_task(collect(fresh.engine, turn)) for turn in turns]
        while (await fresh.engine.load()).running < 16:
            await asyncio.sleep(0.02)
        queued = asyncio.create_task(collect(fresh.engine, request("q", [5, 6], 500)))
        while (await fresh.engine.load()).queued < 1:
            await asyncio.sleep(0.02)
        await fresh.engine.abort("q")
        got = await queued
        assert not any(task.done() for task in filling), "it did not wait for its turn"
        await asyncio.gather(*(fresh.engine.abort(f"f{i}") for i in range(16)), *filling)
        return got

    got = fresh(work())
    assert (ids(got), got[-1].finish) == ([], "abort")


def test_abandoning_the_iterator_frees_the_engine(fresh: Served) -> None:
    async def work() -> None:
        stream = fresh.engine.generate(request("x", [5, 6], 1000, ignore_eos=True))
        await stream.__anext__()
        await stream.aclose()  # type: ignore[attr-defined]
        for _ in range(200):  # 1000 tokens take longer
            if (await fresh.engine.load()).running == 0:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("still running after 4 s")

    fresh(work())


def test_higher_priority_goes_first_and_evicts_nobody(fresh: Served) -> None:
    ends: list[str] = []

    async def one(name: str, limit: int, priority: int) -> None:
        await collect(fresh.engine, request(name, [5, 6, 7], limit, priority, ignore_eos=True))
        ends.append(name)

    async def work() -> None:
        # Slots come free one by one, 20 tokens apart, from 500 on; who waits needs 150 tokens more.
        running = [asyncio.create_task(one(f"low{i}", 500 + 20 * i, -1_000_000)) for i in range(16)]
        while (await fresh.engine.load()).running < 16:
            await asyncio.sleep(0.02)
        queued = [asyncio.create_task(one(f"q{n}", 150, -n)) for n in (3, 9, 1, 7, 5, 0, 8, 2, 6, 4)]
        await asyncio.gather(*running, *queued)

    fresh(work())
    assert [e for e in ends if e.startswith("q")] == [f"q{n}" for n in range(10)]
    assert [e for e in ends if e.startswith("low")] == [f"low{i}" for i in range(16)]
    assert ends[:6] == [f"low{i}" for i in range(6)]  # nothing was evicted for a priority that is a million higher


def test_pause_stops_tokens_and_resume_goes_on_to_the_same_response(fresh: Served) -> None:
    prompt = prompts(1)[0]
    whole = fresh(collect(fresh.engine, request("w", prompt, 600, temperature=0.0, ignore_eos=True)))

    async def work() -> tuple[list[Chunk], list[Chunk]]:
        got: list[Chunk] = []
        cut: list[Chunk] = []

        async def read(name: str, into: list[Chunk]) -> None:
            async for chunk in fresh.engine.generate(request(name, prompt, 600, temperature=0.0, ignore_eos=True)):
                into.append(chunk)

        tasks = [asyncio.create_task(read("p", got)), asyncio.create_task(read("c", cut))]
        while len(ids(got)) < 40:
            await asyncio.sleep(0.01)
        await fresh.engine.pause()
        await asyncio.sleep(1.0)  # what was on its way arrives
        at = len(ids(got))
        assert await fresh.engine.healthy(60.0)
        late = asyncio.create_task(collect(fresh.engine, request("late", prompt, 5)))
        await asyncio.sleep(0.1)
        await fresh.engine.abort("c")
        await fresh.engine.abort("late")  # which the server did not even look at yet
        await asyncio.wait_for(asyncio.gather(tasks[1], late), 60)
        assert ids(late.result()) == [] and late.result()[-1].finish == "abort"
        assert len(ids(got)) == at < 600
        await fresh.engine.resume()
        await tasks[0]
        return got, cut

    got, cut = fresh(work())
    assert ids(got) == ids(whole)
    assert cut[-1].finish == "abort" and 0 < len(ids(cut)) == len(logprobs(cut)) < 600
    assert ids(cut) == ids(whole)[: len(ids(cut))]
    assert torch.allclose(torch.tensor(logprobs(got)), torch.tensor(logprobs(whole)), atol=1e-4)


def test_a_broadcast_in_two_buckets_changes_the_output_the_version_and_empties_the_cache(fresh: Served) -> None:
    prompt = prompts(1, 40)[0]
    before = fresh(collect(fresh.engine, request("b0", prompt, 30, temperature=0.0, ignore_eos=True)))
    warm = fresh(collect(fresh.engine, request("b1", prompt, 30, temperature=0.0, ignore_eos=True)))
    assert warm[-1].cached_tokens == 39 and before[-1].version == fresh.version
    torch.manual_seed(1)
    changed = Qwen3ForCausalLM(fresh.net.config).eval()
    version = fresh.send(dict(changed.state_dict()))
    after = fresh(collect(fresh.engine, request("b2", prompt, 30, temperature=0.7, ignore_eos=True)))
    assert {c.version for c in after} == {version}
    assert after[-1].cached_tokens == 0
    gap = (given(changed, prompt, ids(after), 0.7) - torch.tensor(logprobs(after))).abs().max()
    assert gap < 1e-4
    assert ids(fresh(collect(fresh.engine, request("b3", prompt, 30, temperature=0.0, ignore_eos=True)))) != ids(before)


def test_weights_changed_in_a_pause_split_the_versions_exactly(fresh: Served) -> None:
    prompt = prompts(1)[0]
    torch.manual_seed(2)
    changed = Qwen3ForCausalLM(fresh.net.config).eval()
    old = fresh.version

    async def work() -> list[Chunk]:
        got: list[Chunk] = []

        async def reader() -> None:
            async for chunk in fresh.engine.generate(request("v", prompt, 300, ignore_eos=True)):
                got.append(chunk)

        task = asyncio.create_task(reader())
        while len(ids(got)) < 40:
            await asyncio.sleep(0.01)
        await fresh.engine.pause()
        fresh.version += 1
        await fresh._send(list(changed.state_dict().items()), 2, fresh.version)
        await fresh.engine.resume()
        await task
        return got

    got = fresh(work())
    versions = [c.version for c in got for _ in c.token_ids]
    assert sorted(versions) == versions and set(versions) == {old, old + 1} and len(versions) == 300
    cut = versions.index(old + 1)
    said = torch.tensor(logprobs(got))
    assert (given(fresh.net, prompt, ids(got)[:cut], 1.0) - said[:cut]).abs().max() < 1e-4
    assert (given(changed, prompt, ids(got), 1.0) - said)[cut:].abs().max() < 1e-4


def test_samples_sent_together_share_a_prompt_only_once_it_was_computed(fresh: Served) -> None:
    prompt = prompts(1, 200)[0]

    async def work() -> tuple[list[int], list[int]]:
        first = await asyncio.gather(*(collect(fresh.engine, request(f"s{i}", prompt, 4, ignore_eos=True)) for i in range(4)))
        again = await asyncio.gather(*(collect(fresh.engine, request(f"t{i}", prompt, 4, ignore_eos=True)) for i in range(4)))
        return [c[-1].cached_tokens for c in first], [c[-1].cached_tokens for c in again]

    first, again = fresh(work())
    print("cached tokens of 4 samples sent together:", first, "and of the next 4:", again)
    assert min(first) == 0 and again == [199] * 4


def test_what_cannot_be_served_is_refused_with_a_reason(fresh: Served) -> None:
    with pytest.raises(EngineError, match=r"engine 0: long: .*(1024|context|length)"):
        fresh(collect(fresh.engine, request("long", [5] * 1100, 5)))
    with pytest.raises(EngineError, match="enable_memory_saver"):
        fresh(fresh.engine.release_memory())

    async def twice() -> None:
        await asyncio.gather(*(collect(fresh.engine, request("same", [5], 50, ignore_eos=True)) for _ in range(2)))

    with pytest.raises(EngineError, match="already running"):
        fresh(twice())
    broken = {"model.norm.weight": torch.full_like(fresh.net.model.norm.weight, float("nan"))}
    fresh.send(broken, buckets=1)
    with pytest.raises(EngineError, match="NaN"):
        fresh(collect(fresh.engine, request("nan", [5, 6], 5)))


def test_an_interpreter_without_sglang_is_named(model: SimpleNamespace, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=60)
    engine = make(model, tmp_path, 3, python=str(bare / "bin/python"))
    with pytest.raises(EngineError, match=r"engine 3: .*bare/bin/python has no sglang \(.*\); see .*engine003\.log"):
        asyncio.run(engine.start())
    with pytest.raises(EngineError, match="no such program"):
        asyncio.run(make(model, tmp_path, 3, python=str(tmp_path / "absent")).start())
    with pytest.raises(EngineError, match=r"engine\.options\.port"):
        make(model, tmp_path, 3, options={"port": 1})


def test_a_port_that_another_engine_has_is_told_by_sglang_and_its_answers_are_not_taken_for_ours(
    model: SimpleNamespace, tmp_path: Path, fresh: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, as it costs a whole start; that three are tried is in tests/unit/test_bad_inputs.py."""
    monkeypatch.setattr(sglang_engine, "LAUNCHES", 1)
    monkeypatch.setattr(sglang_server, "free_port", lambda: int(fresh.engine.server.url.rpartition(":")[2]))
    with pytest.raises(EngineError, match=r"engine 4: SGLang's server cannot listen: .*address already in use; see"):
        asyncio.run(make(model, tmp_path, 4).start())
    assert fresh(collect(fresh.engine, request("still", [5, 6], 4)))


def test_two_tp_ranks_say_the_same_and_a_killed_scheduler_fails_requests_quickly(
    model: SimpleNamespace, tmp_path: Path, served: Served
) -> None:
    served = Served(make(model, tmp_path, 1, tp=2), model.net)
    try:
        prompt = prompts(1)[0]
        chunks = served(collect(served.engine, request("t", prompt, 40, temperature=0.7, ignore_eos=True)))
        assert (given(model.net, prompt, ids(chunks), 0.7) - torch.tensor(logprobs(chunks))).abs().max() < 1e-4
        torch.manual_seed(3)
        changed = Qwen3ForCausalLM(model.net.config).eval()
        served.send(dict(changed.state_dict()))
        chunks = served(collect(served.engine, request("u", prompt, 40, temperature=0.7, ignore_eos=True)))
        assert (given(changed, prompt, ids(chunks), 0.7) - torch.tensor(logprobs(chunks))).abs().max() < 1e-4
        pid = served.engine.server.pid
        assert pid is not None
        family = psutil.Process(pid).children(recursive=True)
        schedulers = [p for p in family if "scheduler" in " ".join(p.cmdline())]
        assert len(schedulers) == 2

        async def killed_while_running() -> float:
            stream = served.engine.generate(request("d", prompt, 1000, ignore_eos=True))
            await stream.__anext__()
            schedulers[0].kill()
            began = time.monotonic()
            with pytest.raises(EngineError, match=r"engine 1: .*see .*engine001\.log"):
                async for _ in stream:
                    pass
            return time.monotonic() - began

        assert served(killed_while_running()) < 30
        assert not served(served.engine.healthy(60.0))
        with pytest.raises(EngineError):
            served(collect(served.engine, request("after", prompt, 5)))
    finally:
        served.close()
    assert not child.group_alive(pid)
    assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


RANK = """
import asyncio, sys
from pathlib import Path
from rpipe.config import load
from rpipe.rollout.sglang_engine import SglangEngine
async def main():
    engine = SglangEngine(load(sys.argv[1]), 2, Path(sys.argv[2]), Path(sys.argv[3]))
    await engine.start()
    print(engine.server.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_the_engine_dies_with_its_rank(model: SimpleNamespace, tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    environment = {**os.environ, "PYTHONPATH": str(here.parents[2]), "RANK": "3", "OMPI_COMM_WORLD_RANK": "3"}
    (tmp_path / "run.yaml").write_text(dump(make(model, tmp_path).config))
    command = [sys.executable, "-c", RANK, str(tmp_path / "run.yaml"), str(model.path), str(tmp_path)]
    rank = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        assert len(psutil.Process(pid).children(recursive=True)) >= 2
        seen = psutil.Process(pid).environ()
        assert "RANK" not in seen and not [k for k in seen if k.startswith("OMPI_")]
        rank.kill()
        rank.wait(10)
        deadline = time.monotonic() + 10
        while child.group_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not child.group_alive(pid)
    finally:
        rank.kill()
