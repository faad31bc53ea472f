"""Reward functions as they are, and the pool when they misbehave. Each test starts its own workers (0.05 s)."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rpipe import config
from rpipe.core.types import Prompt
from rpipe.data.prompts import load_prompts
from rpipe.rollout.reward_functions import exact_match, last_integer
from rpipe.rollout.rewards import RewardError, RewardPool

SAMPLES = str(Path(__file__).parents[1] / "data")


@pytest.fixture(autouse=True)
def _samples(monkeypatch):
    monkeypatch.syspath_prepend(SAMPLES)


def prompt(reward, answer="2", **metadata):
    return Prompt("test:1", (1,), "1+1=", answer, reward, metadata)


def mine(name, answer="2", **metadata):
    return prompt(f"reward_samples:{name}", answer, **metadata)


def with_pool(use, functions=None, seed=0, **settings):
    """Runs `use(pool)` under a bound."""

    async def main():
        pool = RewardPool(config.Reward(**{"deadline_s": 5.0, **settings}), seed)
        await pool.start(functions)
        try:
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def one(what, text="two", **settings):
    return with_pool(lambda pool: pool.score(what, text, 3), **settings)


def isolated():
    async def use(pool):
        return pool.isolation

    return with_pool(use).startswith("network off")


def running(mark):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass
    return found


def gone_within(seconds, pids):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children():
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(p) for p in pids if b"reward_worker" in Path(f"/proc/{p}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("22+48=70", "70", 1.0),
        ("22+48=70.", "70", 1.0),
        ("70 then 71", "70", 0.0),
        ("", "70", 0.0),
        ("no number", "70", 0.0),
        ("it is -5", "-5", 1.0),
        ("3-5", "5", 1.0),  # a minus, not a sign
        ("it is \N{MINUS SIGN}5", "-5", 1.0),
        ("1,234", "1234", 1.0),
        ("12.5", "5", 0.0),
        ("12.0", "12", 1.0),
        ("007", "7", 1.0),
        ("-0", "0", 1.0),
        ("٣", "3", 0.0),
        ("9" * 100_000, "9", 0.0),
    ],
)
def test_last_integer_is_the_last_number_of_the_response(response, answer, reward):
    assert last_integer("", response, answer, {}) == reward


def test_last_integer_refuses_an_answer_that_is_none():
    with pytest.raises(ValueError, match="'pear' is not an integer"):
        last_integer("", "3", "pear", {})


def test_exact_match_forgives_white_space_at_the_ends_only():
    assert exact_match("", " 7\n", "7", {}) == 1.0
    assert exact_match("", "7 ", "07", {}) == 0.0


def test_a_users_function_gets_prompt_response_answer_and_metadata():
    assert one(mine("sees", level=7)).reward == 1.0


def test_many_calls_come_back_each_with_its_own_score():
    async def use(pool):
        calls = [pool.score(prompt("last_integer", str(i % 3)), str(i % 5), 1) for i in range(500)]
        calls += [pool.score(mine("length"), "x" * i, 1) for i in range(100)]
        return [s.reward for s in await asyncio.gather(*calls)]

    found = with_pool(use, workers=2)
    assert found[:500] == [float(i % 3 == i % 5) for i in range(500)]
    assert found[500:] == list(range(100))


def test_what_slurm_brings_to_every_process_of_a_rank_costs_no_score():
    async def use(pool):
        before = children()
        scores = asyncio.gather(*(pool.score(mine("sees", level=7), "two", 3) for _ in range(50)))
        await asyncio.sleep(0)
        for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM):
            for pid in before:
                os.kill(pid, number)
        found = [(s.reward, s.error) for s in await scores]
        assert found == [(1.0, "")] * 50
        assert len(before) == 2 and children() == before

    with_pool(use, workers=2)


def test_times_are_this_machines_monotonic_seconds():
    before = time.monotonic()
    score = one(prompt("exact_match"))
    assert before <= score.started_s <= score.ended_s <= time.monotonic()


@pytest.mark.parametrize("name", ["hang", "hang_deaf"])
def test_a_hang_costs_its_own_deadline_only(name):
    async def use(pool):
        hung = asyncio.ensure_future(pool.score(mine(name), "x", 1))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        others = await asyncio.gather(*(pool.score(prompt("exact_match"), "2", 1) for _ in range(100)))
        waited = time.monotonic() - start
        return await hung, others, waited, pool.replaced

    hung, others, waited, replaced = with_pool(use, workers=1, deadline_s=0.5)
    assert (hung.reward, hung.error) == (0.0, f"reward reward_samples:{name} exceeded 0.5 s (reward.deadline_s)")
    assert 0.45 < hung.ended_s - hung.started_s < 20.0, "it would hang for ever"
    assert all(s.reward == 1.0 and not s.error for s in others)
    assert waited < 30.0
    assert replaced == 1


def test_with_two_workers_others_do_not_wait_for_a_hang():
    async def use(pool):
        hung = asyncio.ensure_future(pool.score(mine("hang"), "x", 1))
        await asyncio.sleep(0.05)
        await asyncio.gather(*(pool.score(prompt("exact_match"), "2", 1) for _ in range(100)))
        return hung.done()

    assert with_pool(use, workers=2, deadline_s=30.0) is False


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("fails", "reward reward_samples:fails: ValueError: first line"),
        ("recurse", "reward reward_samples:recurse: RecursionError: maximum recursion depth exceeded"),
        ("quit_politely", "reward reward_samples:quit_politely: SystemExit: no"),
        ("words", "reward reward_samples:words: ValueError: could not convert string to float: 'good'"),
        ("nan", "reward reward_samples:nan returned nan; wanted: a finite number"),
        ("hog", "reward reward_samples:hog: MemoryError: over reward.memory_bytes"),
        ("leave", "reward reward_samples:leave ended its worker (exit status 3)"),
        ("crash", "reward reward_samples:crash ended its worker (signal SIGSEGV)"),
        ("missing", "reward reward_samples:missing: ValueError: cannot be imported: AttributeError: "),
    ],
)
def test_a_function_that_fails_scores_0_says_why_and_the_next_call_is_served(name, error):
    async def use(pool):
        return await pool.score(mine(name), "x", 1), await pool.score(prompt("exact_match"), "2", 1)

    failed, after = with_pool(use, workers=1, memory_bytes=512 << 20)
    assert failed.reward == 0.0
    assert failed.error.startswith(error)
    assert "\n" not in failed.error
    assert (after.reward, after.error) == (1.0, "")


@pytest.mark.parametrize(
    "line",
    [
        '[1, NaN, 0.0, 0.0, "", false, null]',
        '[1, 1e31, 0.0, 0.0, "", false, null]',
        f'[1, 1{"0" * 400}, 0.0, 0.0, "", false, null]',
        '[1, "5", 0.0, 0.0, "", false, null]',
        '[1, 5.0, 9.0, 1.0, "", false, null]',
        '[1, 5.0, 0.0, 1e300, "", false, null]',
        '[1, 5.0, 0.0, 0.0, 7, false, null]',
        '[1, 5.0, 0.0, 0.0, "", false, 7]',
        "[" * 100_000,
        "{",
        "-1",
        str(os.getpid()),
    ],
    ids=lambda line: line[:40],
)  # fmt: skip
def test_what_is_forged_in_a_workers_pipe_is_not_believed_and_the_next_call_is_served(line):
    async def use(pool):
        return await pool.score(mine("forges"), line, 1), await pool.score(prompt("exact_match"), "2", 1)

    forged, after = with_pool(use, workers=1, deadline_s=30.0)
    assert (forged.reward, forged.error) == (0.0, "reward reward_samples:forges broke its worker's pipe")
    assert (after.reward, after.error) == (1.0, "")


def test_calls_behind_one_that_ends_its_worker_are_scored():
    async def use(pool):
        names = ["length", "leave", "length", "hog", "length", "crash", "length"]
        return await asyncio.gather(*(pool.score(mine(n), "abc", 1) for n in names))

    scores = with_pool(use, workers=1, memory_bytes=512 << 20)
    assert [s.reward for s in scores] == [3, 0, 3, 0, 3, 0, 3]


def test_what_a_function_prints_goes_to_the_log_and_not_into_the_answers(tmp_path):
    async def main():
        pool = RewardPool(config.Reward(), 0, tmp_path / "rewards.log")
        await pool.start()
        score = await pool.score(mine("prints"), "x", 1)
        await pool.close()
        return score

    assert asyncio.run(main()).reward == 1.0
    assert (tmp_path / "rewards.log").read_text() == "noise\n[1, 2, 3]\n"


def test_random_functions_score_the_same_again_under_one_seed():
    async def use(pool):
        return [(await pool.score(mine("dice"), text, 1)).reward for text in "abcab"]

    first = with_pool(use, seed=1)
    assert first == with_pool(use, seed=1, workers=2)
    assert first[0] == first[3] and first[0] != first[1]
    assert first != with_pool(use, seed=2)


def test_workers_see_no_secrets_and_no_mpi(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "x")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert one(mine("secret")).reward == 0.0


def test_workers_import_neither_torch_nor_mpi():
    assert one(mine("heavy")).reward == 0.0


def test_functions_reach_no_network_where_the_kernel_isolates():
    if not isolated():
        pytest.skip("this kernel allows no namespaces without root")
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        score = one(mine("telephone", f"{host}:{port}"))
        assert score.reward == 0.0
        assert "Network is unreachable" in score.error or "Connection refused" in score.error
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("text", ["and returns", "and hangs", "and dies"])
def test_what_a_function_starts_ends_with_its_worker(text):
    if not isolated():
        pytest.skip("this kernel allows no namespaces without root")
    mark = f"rpipe-test-{os.getpid()}-{text.replace(' ', '-')}"
    score = one(mine("leaves_a_child", mark), text, deadline_s=1.0)
    assert score.reward == (text == "and returns")
    assert gone_within(2, running(mark))


def test_close_leaves_no_process_and_answers_those_who_wait():
    async def main():
        pool = RewardPool(config.Reward(workers=2), 0)
        await pool.start()
        waiting = [asyncio.ensure_future(pool.score(mine("hang"), "x", 1)) for _ in range(4)]
        await asyncio.sleep(0.1)
        started = children()
        await pool.close()
        assert len(started) == 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in started)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(r) for r in results] == ["the reward pool is closed"] * 4

    asyncio.run(asyncio.wait_for(main(), 30))


def test_close_ends_workers_that_are_just_being_replaced():
    async def main():
        pool = RewardPool(config.Reward(workers=1), 0)
        await pool.start()
        await pool.score(mine("leave"), "x", 1)
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert children() == []


def interpreter(folder, script):
    """In the workers' place; it is called as they are, so that `children` finds it."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def cancelled(pool, start):
    """Cancels a start that `start(pool, task)` brings half-way; the processes that there were by then."""

    async def main():
        task = asyncio.ensure_future(pool.start())
        await start(pool, task)
        assert not task.done()
        there = children()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(Path(f"/proc/{pid}").exists() for pid in there)  # killed, and reaped
        assert children() == []
        return there

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_start_that_is_cancelled_ends_the_workers_that_are_up_and_those_that_are_not(monkeypatch, tmp_path):
    first = f'if mkdir {tmp_path}/first 2>/dev/null; then exec {sys.executable} "$@"; fi; while :; do sleep 1; done'
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, first))

    async def one_is_up(pool, task):
        while not pool.isolation:
            await asyncio.sleep(0.005)

    assert len(cancelled(RewardPool(config.Reward(workers=3), 0), one_is_up)) == 3


@pytest.mark.parametrize("turns", range(1, 9))
def test_a_start_that_is_cancelled_while_processes_are_made_waits_for_no_pipe(monkeypatch, tmp_path, turns):
    """`turns` of the loop after its begin, by when each process has started another, which holds the worker's pipe."""
    mark = f"{300 + turns}.{os.getpid()}"
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, f"sleep {mark} & wait"))

    async def some_turns(pool, task):
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.1)  # processes go on, the loop does not

    cancelled(RewardPool(config.Reward(workers=2), 0), some_turns)
    assert gone_within(2, running(mark))


def test_workers_end_when_their_parent_is_killed():
    code = (
        "import asyncio\n"
        "from rpipe import config; from rpipe.core.types import Prompt; from rpipe.rollout.rewards import RewardPool\n"
        "async def main():\n"
        "    pool = RewardPool(config.Reward(workers=2), 0); await pool.start(); print('ready', flush=True)\n"
        "    await pool.score(Prompt('x', (1,), '', '', 'reward_samples:hang_deaf'), '', 1)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SAMPLES, *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    try:
        assert parent.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        pids = [int(p) for p in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        pids += [int(c) for p in pids for c in Path(f"/proc/{p}/task/{p}/children").read_text().split()]
        assert len(pids) >= 2
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    assert gone_within(3, pids)


WANTED = "wanted: package.module:function, on PYTHONPATH or below the working directory"
NO_SUCH = "module 'reward_samples' has no attribute 'nope'"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exactmatch", "unknown; wanted: exact_match, last_integer, math_verify, reasoning_gym or package.module:function"),
        ("no_such_module_here:f", f"cannot be imported: ModuleNotFoundError: No module named 'no_such_module_here'; {WANTED}"),
        ("reward_samples:nope", f"cannot be imported: AttributeError: {NO_SUCH}; {WANTED}"),
        ("reward_samples:os.sep", "is a str; wanted: a function"),
    ],
)
def test_a_function_that_does_not_load_is_one_line_at_the_start_naming_the_key(name, message):
    async def use(pool):
        raise AssertionError("started")

    with pytest.raises(RewardError) as caught:
        with_pool(use, {"exact_match": "data.train.reward", name: "data.held_out.reward"})
    assert str(caught.value) == f"data.held_out.reward = {name}: {message}"


def broken_interpreter(folder):
    return interpreter(folder, "echo first; echo no such library >&2; exit 7")


def test_a_worker_that_cannot_start_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", broken_interpreter(tmp_path))
    with pytest.raises(RewardError, match=r"^a reward worker ended at its start \(exit status 7\): no such library$"):
        with_pool(lambda pool: pool.score(prompt("exact_match"), "2", 1))


def test_a_pool_whose_workers_start_no_more_says_so_and_does_not_hang(monkeypatch, tmp_path):
    async def use(pool):
        monkeypatch.setattr(sys, "executable", broken_interpreter(tmp_path))
        assert (await pool.score(mine("leave"), "x", 1)).reward == 0
        return await pool.score(prompt("exact_match"), "2", 1)

    with pytest.raises(RewardError, match=r"^reward workers do not start any more, 3 tries: .*no such library$"):
        with_pool(use, workers=1)


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"\frac{1}{2}", r"so the answer is $\boxed{\frac{2}{4}}$.", 1.0),
        (r"\frac{1}{2}", r"\frac{1}{3}", 0.0),
        ("x^2-1", r"$(x-1)(x+1)$", 1.0),
        ("70", "I do not know", 0.0),
    ],
)
def test_math_verify_compares_as_mathematics(answer, response, reward):
    score = one(prompt("math_verify", answer), response)
    assert (score.reward, score.error) == (reward, "")


def test_a_tower_of_powers_is_bounded():
    async def use(pool):
        start = time.monotonic()
        tower = await pool.score(prompt("math_verify", "9^{9^{9^9}}"), r"$9^{9^{9^{9}}}-1$", 1)
        took = time.monotonic() - start
        return tower, took, await pool.score(prompt("math_verify", "4"), "$2+2$", 1)

    tower, took, after = with_pool(use, {"math_verify": "data.train.reward"}, deadline_s=2.0)
    assert tower.reward == 0.0
    assert took < 10
    assert after.reward == 1.0


class Characters:
    def __call__(self, texts, add_special_tokens):
        return {"input_ids": [[ord(c) for c in t] for t in texts]}


def gym(name):
    source = config.Source(kind="reasoning_gym", name=name, size=3, reward="reasoning_gym")
    return load_prompts(source, Characters(), 10_000, Path())


def gym_scores(prompts, what, texts):
    async def use(pool):
        return [await pool.score(what, text, 1) for text in texts]

    scores = with_pool(use, prompts.rewards, workers=1)
    assert [s.error for s in scores] == [""] * len(texts)
    return [s.reward for s in scores]


def test_reasoning_gym_scores_with_its_own_scorer_at_full_marks_only():
    prompts = gym("chain_sum")
    what = prompts[2]
    right = [what.answer, f"hm, 5\n<answer>{what.answer}</answer>"]
    assert gym_scores(prompts, what, [*right, f"it may be {what.answer}", "no", prompts[0].answer]) == [1, 1, 0, 0, 0]


def test_reasoning_gym_finds_an_entry_again_that_follows_the_hash_seed():
    prompts = gym("isomorphic_strings")
    assert gym_scores(prompts, prompts[1], [prompts[1].answer, "perhaps"]) == [1, 0]


def test_a_reasoning_gym_scorer_that_raises_on_a_response_means_0():
    prompts = gym("prime_factorization")
    assert gym_scores(prompts, prompts[1], [prompts[1].answer, "twelve"]) == [1, 0]


def test_cheap_scores_cost_the_parent_under_300_microseconds():
    async def use(pool):
        text = "22+48=70 " * 20
        await pool.score(prompt("last_integer", "70"), text, 1)
        before = time.process_time()
        await asyncio.gather(*(pool.score(prompt("last_integer", "70"), text, 1) for _ in range(2000)))
        return (time.process_time() - before) / 2000

    assert with_pool(use, workers=1) < 300e-6
