"""The models under the simulator: published decode speeds, lengths that are distributed as asked, cores that are shared."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

from rpipe import config as configs
from rpipe.config import ConfigError
from rpipe.config_simulation import MeasuredTrainer, Workload
from rpipe.sim.costs import MeasuredReplica, Roofline, call_s, engine_costs
from rpipe.sim.kernel import Host, Kernel
from rpipe.sim.shape import Shape
from rpipe.sim.workload import Synthetic, from_trace

ROOT = Path(__file__).resolve().parents[2]
REASONING = ROOT / "configs" / "sim" / "reasoning-14b-a800.yaml"
# Qwen's published tokens a second of Qwen2.5 on one A100-80GB (one request, vLLM 0.6.3, bf16), at contexts of 1 and 30,720:
# parameters, layers, hidden size, kv heads, then the two speeds.
QWEN = {
    "0.5B": (494_000_000, 24, 896, 2, 64, 311.55, 264.51),
    "1.5B": (1_544_000_000, 28, 1536, 2, 128, 183.33, 152.04),
    "3B": (3_086_000_000, 36, 2048, 2, 128, 127.61, 105.88),
    "7B": (7_070_000_000, 28, 3584, 4, 128, 84.28, 70.33),
    "14B": (13_990_000_000, 48, 5120, 8, 128, 46.3, 37.18),
}


@pytest.mark.parametrize("name", QWEN)
def test_the_a100_profile_decodes_as_was_published(name):
    parameters, layers, hidden, kv_heads, head_dim, at_1, at_30720 = QWEN[name]
    shape = Shape(parameters, parameters, layers, hidden, kv_heads, head_dim, 1, 1, 2)
    hardware = configs.load(ROOT / "configs" / "sim" / "sweep-base.yaml").hardware
    assert hardware is not None and hardware.accelerator is not None
    costs = Roofline(hardware.accelerator, shape, 1, 100_000)
    assert 1 / costs.decode_s(1, 1) == pytest.approx(at_1, rel=0.1)
    assert 1 / costs.decode_s(1, 30_720) == pytest.approx(at_30720, rel=0.2)


def test_tensor_parallelism_pays_where_weights_are_read_and_not_where_they_are_small():
    costs = [engine_costs(configs.load(REASONING, [f"engine.tp={tp}"])) for tp in (1, 2, 4)]
    assert costs[2].decode_s(8, 8_000) < costs[1].decode_s(8, 8_000) < costs[0].decode_s(8, 8_000)
    assert 4 * costs[0].kv_tokens < costs[2].kv_tokens, "weights are held once"
    small, wide = ["model.shape.layers=80", "engine.tp=1"], ["model.shape.layers=80", "engine.tp=2"]
    one, two = (engine_costs(configs.load(ROOT / "configs/sim/rolloutpipe-1.7b.yaml", o)) for o in (small, wide))
    assert two.decode_s(1, 100) > one.decode_s(1, 100), "collectives cost more than they save"


@pytest.mark.parametrize(("stages", "count"), [(1, 4), (2, 1), (2, 4), (4, 8), (4, 64)])
def test_a_pipeline_idles_for_its_bubble_and_gains_nothing_from_one_micro_batch(stages, count):
    costs = MeasuredReplica(MeasuredTrainer(micro_batch_s=0.1, token_s=0.01), stages)
    took_s, alone_s = call_s(costs, [[40, 50]] * count), count * costs.micro_batch_s([40, 50])
    assert took_s == pytest.approx(alone_s / stages / (1 - (stages - 1) / (count + stages - 1)))
    uneven_s = call_s(costs, [[90 + count - 1], *[[89]] * (count - 1)])
    assert (uneven_s > took_s) == (count > 1 and stages > 1), "the longest holds every stage up once"


def correlation(groups: list[list[float]]) -> float:
    """Intraclass, by analysis of variance."""
    k = len(groups[0])
    between = k * statistics.variance([statistics.mean(g) for g in groups])
    within = statistics.mean([statistics.variance(g) for g in groups])
    return (between - within) / (between + (k - 1) * within)


@pytest.mark.parametrize("wanted", [0.0, 0.3, 0.9])
def test_lengths_have_the_median_spread_and_correlation_that_were_asked_for(wanted):
    source = Synthetic(Workload(median_tokens=800, sigma=0.9, correlation=wanted), 3, 10**9)
    logs = [[math.log(n) for n in source.group(group, 0, 8).output_tokens] for group in range(1500)]
    every = [x for group in logs for x in group]
    assert math.exp(statistics.median(every)) == pytest.approx(800, rel=0.1)
    assert statistics.stdev(every) == pytest.approx(0.9, rel=0.05)
    assert correlation(logs) == pytest.approx(wanted, abs=0.05)


def test_lengths_follow_the_quantiles_and_stop_at_the_limit():
    workload = configs.load(REASONING).workload
    lengths = [n for group in range(2000) for n in Synthetic(workload, 0, 16_384).group(group, 0, 4).output_tokens]
    found = statistics.quantiles(lengths, n=100)
    assert (found[49], found[94]) == (pytest.approx(792, rel=0.1), pytest.approx(5701, rel=0.12))
    assert max(lengths) == 16_384


def test_a_group_s_work_depends_on_seed_and_number_alone():
    workload = Workload(reward_s=0.1, reward_sigma=0.5)
    once, again, other = (Synthetic(workload, seed, 1000) for seed in (1, 1, 2))
    assert once.group(7, 0, 4) == again.group(7, 3, 4) != other.group(7, 0, 4)
    assert once.group(-1, 0, 1) != once.group(-1, 5, 1), "every evaluation samples anew"


def test_a_trace_is_looked_up_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"group": 0, "sample": s, "output_tokens": 10 + s, "prompt_tokens": 5, "reward": 1.0} for s in range(2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = from_trace(Workload(lengths="trace", path=str(path)), 0)
    work = source.group(0, 0, 2)
    assert (work.prompt_tokens, work.output_tokens, work.rewards) == (5, [10, 11], [1.0, 1.0])
    with pytest.raises(ConfigError, match=r"holds no trajectory 0\.2"):
        source.group(0, 0, 3)
    path.write_text('{"group": 0, "sample": 0, "output_tokens": 3}\n{"group": 0}\n')
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: not a trajectory"):
        from_trace(Workload(lengths="trace", path=str(path)), 0)


def test_cores_are_shared_in_proportion_to_what_is_asked():
    kernel, ends = Kernel(), {}
    host = Host(kernel, 2.0)
    host.start(3.0, 1.5, lambda: ends.update(engine=kernel.now))
    kernel.at(1.0, lambda: host.start(1.0, 1.0, lambda: ends.update(trainer=kernel.now)))
    kernel.run()
    assert ends["trainer"] == pytest.approx(1.0 + 1.25), "2.5 cores asked of 2: both at 80 %"
    assert ends["engine"] == pytest.approx(3.25), "a fifth of 1.25 s was lost"
