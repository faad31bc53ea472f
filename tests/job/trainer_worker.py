"""One rank of the trainer's tests: measures under real MPI, writes what it saw; test_trainer.py judges.

usage: trainer_worker.py SCENARIO FOLDER     -> FOLDER/SCENARIO.json, written by rank 0
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from rpipe.config import Loss
from rpipe.core.types import Sequences
from rpipe.training import megatron
from rpipe.training.megatron import MegatronTrainer
from tests.job import trainer_reference as plain

MODELS = [("qwen3", True), ("qwen3", False), ("qwen2", True), ("qwen2", False), ("llama", True), ("llama", False)]


def hf_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for bucket in trainer.weight_buckets(10_000) for name, t in bucket}


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference; infinite where the names differ."""
    if set(a) != set(b):
        return float("inf")
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest |a - b| of a tensor over the largest |b| of all."""
    return worst(a, b) / max(float(t.abs().max()) for t in b.values())


def named(model: Any, what: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: what(p).clone() for n, p in model.named_parameters()}


def step(trainer: MegatronTrainer, batches: list[Sequences]) -> Any:
    trainer.begin_step()
    for batch in batches:
        trainer.accumulate([batch])
    return trainer.finish_step()


def thirds(batch: Sequences) -> list[Sequences]:
    return [batch.select(list(range(i, batch.count, 3))) for i in range(3)]


def reference(folder: Path) -> dict[str, Any]:
    """Three steps of each architecture against transformers and torch's AdamW."""
    out: dict[str, Any] = {}
    for i, (architecture, tied) in enumerate(MODELS):
        where = plain.make_model(
            folder / f"{architecture}-{tied}", architecture, tied, i, "40KB" if tied else "5GB", architecture == "llama"
        )
        config = plain.settings(where)
        trainer, model = MegatronTrainer(config, where), hf_model(where)
        optimizer = plain.adamw(model, config)
        start, grads, norms, stats_off = worst(weights(trainer), named(model, lambda p: p.data)), 0.0, 0.0, 0.0
        for k in range(3):
            batch = plain.near(model, plain.sequences(9, 10 * i + k), config.rollout.temperature, 0.3)
            optimizer.zero_grad()
            total, told = plain.objective(model, batch, config.training.loss, config)
            total.backward()
            trainer.begin_step()
            for part in thirds(batch):
                trainer.accumulate([part])
            mine = {n: g / batch.trained_tokens for n, g in trainer.export_grads().items()}
            grads = max(grads, relative(mine, named(model, lambda p: p.grad)))
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.optimizer.clip_grad_norm))
            optimizer.step()
            stats = trainer.finish_step()
            norms = max(norms, abs(stats.grad_norm - norm) / norm)
            stats_off = max(stats_off, max(abs(getattr(stats, n) - v) for n, v in told.items()))
        after = worst(weights(trainer), named(model, lambda p: p.data))
        specs = [(n, d, list(s)) for n, d, s in trainer.weight_specs()]
        same = specs == [(n, "float32", list(t.shape)) for n, t in weights(trainer).items()]
        files = len(list(where.glob("*.safetensors")))
        out[f"{architecture} {'tied' if tied else 'untied'}"] = {
            "start": start,
            "grads": grads,
            "norm": norms,
            "stats": stats_off,
            "weights": after,
            "specs": same,
            "files": files,
            "clip": told["clip_fraction"],
        }
    return out


def losses(folder: Path) -> dict[str, Any]:
    """Aggregations, KL, no given log-probs, chunks: gradients against the plain objective."""
    where = plain.make_model(folder / "loss", "qwen3", True)
    model, other = hf_model(where), hf_model(plain.make_model(folder / "loss-other", "qwen3", True, seed=9))
    cases = {
        "token_mean": (Loss(aggregation="token_mean"), True),
        "sequence_mean": (Loss(aggregation="sequence_mean"), True),
        "fixed": (Loss(aggregation="fixed"), True),
        "narrow_clip": (Loss(clip_low=0.05, clip_high=0.1), True),
        "kl": (Loss(kl_coefficient=0.3), True),
        "no_given": (Loss(), False),
    }
    out: dict[str, Any] = {}
    for name, (loss, given) in cases.items():
        config = plain.settings(where, loss=loss.model_dump())
        trainer = MegatronTrainer(config, where)
        if name == "kl":  # else the reference is the policy, and both the divergence and its gradient are zero
            trainer._reference = {**dict(MegatronTrainer(config, folder / "loss-other").model.named_parameters())}
        batch = plain.sequences(8, 5)
        batch = plain.near(model, batch, 0.8, 0.3) if given else plain.sequences(8, 5, given=False)
        model.zero_grad()
        total, told = plain.objective(model, batch, loss, config, other if name == "kl" else None)
        total.backward()
        trainer.begin_step()
        for part in thirds(batch):
            trainer.accumulate([part])
        divisor = batch.trained_tokens if loss.aggregation == "token_mean" else batch.count
        grads = {n: g / divisor for n, g in trainer.export_grads().items()}
        stats = trainer.finish_step()
        off = max(abs(getattr(stats, n) - v) for n, v in told.items() if given or n != "loss")
        out[name] = {
            "grads": relative(grads, named(model, lambda p: p.grad)),
            "stats": off,
            "kl": stats.kl,
            "clip": stats.clip_fraction,
        }
    return {**out, "chunks": chunks(where)}


def chunks(where: Path) -> float:
    batch, grads = plain.sequences(8, 5), []
    for size in (1, 7, 10_000):
        config = plain.settings(where)
        config = config.model_copy(update={"training": config.training.model_copy(update={"logprob_chunk_tokens": size})})
        trainer = MegatronTrainer(config, where)
        trainer.begin_step()
        trainer.accumulate([batch])
        grads.append(trainer.export_grads())
    return max(relative(grads[0], grads[2]), relative(grads[1], grads[2]))


def guards(folder: Path) -> dict[str, Any]:
    """Not-finite gradients, determinism, resume, pinned log-probs, warm-up, export."""
    where = plain.make_model(folder / "guards", "qwen3", True)
    config = plain.settings(where, schedule="cosine", warm_up_steps=1)
    data = [plain.sequences(6, 20 + k) for k in range(6)]
    trainer, twin = MegatronTrainer(config, where), MegatronTrainer(config, where)
    first = [step(trainer, [b]) for b in data[:2]]
    for b in data[:2]:
        step(twin, [b])
    out: dict[str, Any] = {"deterministic": worst(weights(trainer), weights(twin)), "rates": [s.learning_rate for s in first]}
    out["nan"] = not_finite(trainer, twin, data)
    out["resume"] = resume(trainer, config, where, folder / "checkpoint", data)
    out["export"] = export(trainer, folder / "exported", data[0])
    out["warm_up"] = warm_up(config, where)
    out["pinned"] = pinned(config, where, data)
    out["bfloat16"] = bfloat16(config, where, folder / "checkpoint-bf16", data)
    return out


def not_finite(trainer: MegatronTrainer, twin: MegatronTrainer, data: list[Sequences]) -> dict[str, Any]:
    before, steps = weights(trainer), trainer.optimizer.steps
    trainer.begin_step()
    trainer.accumulate([data[2]])
    next(trainer.model.parameters()).main_grad[0, 0] = float("nan")
    stats = trainer.finish_step()
    unchanged = worst(weights(trainer), before)
    kept = trainer.optimizer.steps == steps
    # the moments did not change either: the next step ends where a trainer that never saw the NaN does
    a, b = step(trainer, [data[3]]), step(twin, [data[3]])
    return {
        "skipped": stats.skipped,
        "unchanged": unchanged,
        "schedule_kept": kept,
        "next_skipped": a.skipped,
        "next": worst(weights(trainer), weights(twin)),
        "same": a == b,
    }


def resume(trainer: MegatronTrainer, config: Any, where: Path, to: Path, data: list[Sequences]) -> dict[str, Any]:
    trainer.save(to, {"iteration": 4, "cursor": [1, 2]})
    random = torch.rand(3)
    other = MegatronTrainer(config, where)
    extra = other.load(to)
    out: dict[str, Any] = {
        "extra": extra,
        "loaded": worst(weights(other), weights(trainer)),
        "random": bool(torch.equal(random, torch.rand(3))),
    }
    a, b = [[step(t, [x]) for x in data[4:]] for t in (trainer, other)]
    out.update(later=worst(weights(other), weights(trainer)), same_stats=a == b, left=[p.name for p in to.parent.glob("*.tmp")])
    trainer.save(to, {"iteration": 5})  # over an older one
    out["again"] = MegatronTrainer(config, where).load(to)
    biggest = max(to.iterdir(), key=lambda p: p.stat().st_size)
    biggest.write_bytes(biggest.read_bytes()[:-1])
    try:
        other.load(to)
        out["torn"] = "loaded"
    except ValueError as error:
        out["torn"] = str(error)
    try:
        other.load(to.with_name("none"))
    except ValueError as error:
        out["absent"] = str(error)
    return out


def export(trainer: MegatronTrainer, to: Path, batch: Sequences) -> dict[str, Any]:
    (trainer.model_dir / "tokenizer.json").write_text("{}")
    megatron.HF_FILE_BYTES = 100_000  # several files
    trainer.export_hf(to)
    model = hf_model(to)
    with torch.no_grad():
        theirs = np.concatenate([plain.logprobs(model, batch, i, 0.8)[0].numpy() for i in range(batch.count)]) * batch.loss_mask
    off = float(np.abs(trainer.logprobs(batch) - theirs).max())
    again = MegatronTrainer(trainer.config, to)
    return {
        "logprobs": off,
        "round_trip": worst(weights(again), weights(trainer)),
        "transformers": worst(named(model, lambda p: p.data), weights(trainer)),
        "files": len(list(to.glob("*.safetensors"))),
        "tokenizer": (to / "tokenizer.json").exists(),
    }


def supervised() -> Sequences:
    return replace(plain.sequences(32, 3, given=False), advantages=np.ones(32, np.float32))


def warm_up(config: Any, where: Path) -> dict[str, Any]:
    trainer, one = MegatronTrainer(config, where), supervised()
    first = trainer.warm_up([one], 0.0, 200)
    last = trainer.warm_up([one] * 25, 3e-3, 200)
    moments = [float(m.abs().max()) for m in trainer.optimizer.moments()]
    stats = step(trainer, [plain.sequences(6, 1)])
    # a trainer that reads the warmed-up weights and never warmed up ends its first step at the same bits
    trainer = MegatronTrainer(config, where)
    trainer.warm_up([one] * 3, 3e-3, 200)
    trainer.export_hf(where.with_name("warmed"))
    fresh = MegatronTrainer(config, where.with_name("warmed"))
    for t in (trainer, fresh):
        step(t, [plain.sequences(6, 1)])
    return {
        "first": first,
        "last": last,
        "moments": moments,
        "rate": stats.learning_rate,
        "as_new": worst(weights(trainer), weights(fresh)),
    }


def pinned(config: Any, where: Path, data: list[Sequences]) -> dict[str, Any]:
    """Ratios are against the weights last published, not the given log-probs, and not what steps since made of them."""
    other = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"old_logprob": "pinned"})})
    trainer, engine = MegatronTrainer(other, where), MegatronTrainer(config, where)
    off = []
    for published in (data[:2], data[2:4]):
        weights(trainer)
        for batch, own in zip(published, [replace(b, logprobs=engine.logprobs(b)) for b in published]):
            step(trainer, [batch])
            step(engine, [own])
        off.append(relative(trainer.weights.gradients(), engine.weights.gradients()))
    return {"grads": max(off)}


def bfloat16(config: Any, where: Path, to: Path, data: list[Sequences]) -> dict[str, Any]:
    """Weights in bfloat16, gradients and moments in float32, resumed with the float32 weights behind the bfloat16 ones."""
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    trainer, other = MegatronTrainer(config, where), MegatronTrainer(config, where)
    step(trainer, data[:1])
    trainer.save(to, {})
    other.load(to)
    for batch in data[1:]:
        a, b = step(trainer, [batch]), step(other, [batch])
    dtypes = {str(t.dtype) for t in weights(trainer).values()} | {d for _, d, _ in trainer.weight_specs()}
    grads = {str(p.main_grad.dtype) for p in trainer.model.parameters()}
    return {"dtypes": sorted(dtypes), "grads": sorted(grads), "later": worst(weights(trainer), weights(other)), "same": a == b}


def streamed(folder: Path, tp: int, owners: list[int]) -> dict[str, Any]:
    """Two steps of six micro-batches spread unevenly over replicas, against transformers on the whole batch."""
    config = plain.settings(folder / "stream", dist.get_world_size(), tp)
    trainer, model = MegatronTrainer(config, folder / "stream"), hf_model(folder / "stream")
    optimizer = plain.adamw(model, config)
    grads = norm_off = stats_off = 0.0
    everyone: list[Any] = []
    for k in range(2):
        whole = plain.near(model, plain.sequences(18, 40 + k), config.rollout.temperature, 0.3)
        parts = [whole.select(list(range(3 * i, 3 * i + 3))) for i in range(6)]
        optimizer.zero_grad()
        total, told = plain.objective(model, whole, config.training.loss, config)
        total.backward()
        trainer.begin_step()
        for part, owner in zip(parts, owners):
            if owner == trainer.replica:
                trainer.accumulate([part])
        mine = trainer.export_grads()
        for g in mine.values():  # a sum over replicas; tensor-parallel ranks hold the same
            dist.all_reduce(g)
            g.div_(tp * whole.trained_tokens)
        grads = max(grads, relative(mine, named(model, lambda p: p.grad)))
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.optimizer.clip_grad_norm))
        optimizer.step()
        stats = trainer.finish_step()
        norm_off = max(norm_off, abs(stats.grad_norm - norm) / norm)
        stats_off = max(stats_off, max(abs(getattr(stats, n) - v) for n, v in told.items()))
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, stats)
    mine = weights(trainer)
    off = worst(mine, named(model, lambda p: p.data)) if trainer.replica == 0 else 0.0
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, off)
    poison = not_finite_on_one(trainer)
    return {
        "grads": grads,
        "norm": norm_off,
        "stats": stats_off,
        "weights": max(gathered),
        "same": all(s == everyone[0] for s in everyone),
        "poison": poison,
        "replica": trainer.replica,
        "replicas": trainer.replicas,
    }


def not_finite_on_one(trainer: MegatronTrainer) -> list[bool]:
    """A NaN on the last rank alone: everybody skips."""
    trainer.begin_step()
    trainer.accumulate([plain.sequences(3, 60)])
    if dist.get_rank() == dist.get_world_size() - 1:
        next(trainer.model.parameters()).main_grad.fill_(float("nan"))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, trainer.finish_step().skipped)
    return told


def dp2(folder: Path) -> dict[str, Any]:
    if dist.get_rank() == 0:
        plain.make_model(folder / "stream", "qwen3", True)
        plain.make_model(folder / "qwen2", "qwen2", False)
    dist.barrier()
    out = {"uneven": streamed(folder, 1, [0, 0, 1, 0, 1, 0]), "none": streamed(folder, 1, [0, 0, 0, 0, 0, 0])}
    # with guards' one rank: the same three supervised steps, here half on each replica
    trainer = MegatronTrainer(plain.settings(folder / "guards", 2, schedule="cosine", warm_up_steps=1), folder / "guards")
    trainer.warm_up([supervised()] * 3, 3e-3, 200)
    alone = MegatronTrainer(trainer.config, folder / "warmed")
    warmed = worst(weights(trainer), weights(alone)) if trainer.replica == 0 else 0.0
    return {**out, "saved": reshard_save(folder), "warmed": warmed}


def reshard_save(folder: Path) -> dict[str, Any]:
    """Two steps, save, two more; what came out goes to files for the other layout to meet."""
    config = plain.settings(folder / "qwen2", 2, 1, loss={"kl_coefficient": 0.1})
    trainer = MegatronTrainer(config, folder / "qwen2")
    for k in range(2):
        step(trainer, [plain.sequences(4, 70 + k + 10 * trainer.replica)])
    trainer.save(folder / "reshard", {"at": 2})
    norms = []
    at_save = weights(trainer)
    for k in range(2, 4):
        norms.append(step(trainer, [plain.sequences(4, 70 + k + 10 * trainer.replica)]).grad_norm)
    if dist.get_rank() == 0:
        torch.save([at_save, weights(trainer)], folder / "reshard.pt")
    return {"norms": norms}


def tp2(folder: Path) -> dict[str, Any]:
    config = plain.settings(folder / "qwen2", 2, 2, loss={"kl_coefficient": 0.1})
    trainer = MegatronTrainer(config, folder / "qwen2")
    extra = trainer.load(folder / "reshard")
    at_save, after = torch.load(folder / "reshard.pt")
    loaded = worst(weights(trainer), at_save)
    stats = [step(trainer, [plain.sequences(4, 70 + k), plain.sequences(4, 80 + k)]) for k in range(2, 4)]
    reshard = {
        "extra": extra,
        "loaded": loaded,
        "after": worst(weights(trainer), after),
        "norms": [s.grad_norm for s in stats],
        "kl": stats[-1].kl,
    }
    trainer.export_hf(folder / "tp2-exported")
    whole = weights(trainer)
    exported = worst(named(hf_model(folder / "tp2-exported"), lambda p: p.data), whole)
    return {"streamed": streamed(folder, 2, [0] * 6), "reshard": reshard, "exported": exported}


def tp2dp2(folder: Path) -> dict[str, Any]:
    return streamed(folder, 2, [1, 0, 1, 1, 1, 0])


def main() -> None:
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    world = MPI.COMM_WORLD
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    result = globals()[scenario](folder)
    if world.rank == 0:
        (folder / f"{scenario}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
