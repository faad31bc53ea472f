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
from torch.utils._python_dispatch import TorchDispatchMode

from rpipe.config import Config, Loss
from rpipe.core.types import Sequences
from rpipe.runtime.checkpoints import NotWritten
from rpipe.training import megatron
from rpipe.training.megatron import MegatronTrainer
from tests.job import trainer_reference as plain

MODELS = [("qwen3", True), ("qwen3", False), ("qwen2", True), ("qwen2", False), ("llama", True), ("llama", False)]


def hf_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Whole on rank 0, empty elsewhere; all ranks call it."""
    found = {name: t.clone() for bucket in trainer.weight_buckets(10_000) for name, t in bucket}
    return found if dist.get_rank() == 0 else {}


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference; infinite where the names differ."""
    if set(a) != set(b):
        return float("inf")
    return max((float((a[n] - b[n]).abs().max()) for n in a), default=0.0)


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest |a - b| of a tensor over the largest |b| of all."""
    return worst(a, b) / max(float(t.abs().max()) for t in b.values())


def named(model: Any, what: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names of files: transformers 5 holds all experts of a layer in two tensors."""
    found: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        t, (before, last) = what(p).clone(), name.rsplit(".", 1)
        if not before.endswith("experts"):
            found[name] = t
            continue
        for i, expert in enumerate(t):
            if last == "down_proj":
                found[f"{before}.{i}.down_proj.weight"] = expert
            else:
                gate, up = expert.chunk(2, 0)
                found.update({f"{before}.{i}.gate_proj.weight": gate, f"{before}.{i}.up_proj.weight": up})
    return found


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
    return {**out, "chunks": chunks(where), "recompute": recompute(where), "importance": importance(where, model)}


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


def recompute(where: Path) -> dict[str, float]:
    """Gradients with a layer's activations computed again, and how often layers ran forward for one micro-batch."""
    batch, grads, calls = plain.sequences(8, 5), [], []
    for mode in ("none", "full"):
        trainer = MegatronTrainer(plain.settings(where, cut={"recompute": mode}), where)
        count = [0]
        for layer in trainer.model.decoder.layers:
            layer.self_attention.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        trainer.begin_step()
        trainer.accumulate([batch])
        grads.append(trainer.export_grads())
        calls.append(count[0])
    return {"grads": relative(grads[1], grads[0]), "none": calls[0], "full": calls[1]}


def importance(where: Path, model: Any) -> dict[str, float]:
    """Truncated importance sampling: ratios against the trainer's own round-start log-probs, weights against the engine's."""
    tree = plain.settings(where).model_dump()
    tree["training"]["loss"]["importance_cap"], tree["pipeline"]["old_logprob"] = 1.05, "pinned"
    config = Config.model_validate(tree)
    trainer, batch = MegatronTrainer(config, where), plain.near(model, plain.sequences(8, 5), 0.8, 0.1)
    own = replace(batch, logprobs=trainer.logprobs(batch))
    model.zero_grad()
    total = torch.zeros(())
    for i in range(batch.count):
        at = slice(int(batch.lengths[:i].sum()), int(batch.lengths[: i + 1].sum()))
        mask = torch.from_numpy(batch.loss_mask[at].astype(bool))
        now = plain.logprobs(model, batch, i, 0.8)[0][mask]
        old, engine = (torch.from_numpy(b.logprobs[at])[mask] for b in (own, batch))
        weight = (old - engine).exp().clamp(max=1.05)
        total = total - (weight * (now - old).exp() * float(batch.advantages[i])).sum()  # at ratio one nothing is clipped
    total.backward()
    trainer.begin_step()
    trainer.accumulate([batch])
    return {"grads": relative(trainer.export_grads(), named(model, lambda p: p.grad))}


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
    out["untrained"] = untrained(config, where, data)
    out["kept"] = kept(config, where, folder, data)
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


def untrained(config: Any, where: Path, data: list[Sequences]) -> dict[str, Any]:
    """A step of empty responses after one that left momentum behind, under an aggregation that counts sequences."""
    loss = config.training.loss.model_copy(update={"aggregation": "sequence_mean"})
    training = config.training.model_copy(update={"loss": loss})
    trainer = MegatronTrainer(config.model_copy(update={"training": training}), where)
    step(trainer, data[:1])
    before, steps = weights(trainer), trainer.optimizer.steps
    stats = step(trainer, [replace(data[1], loss_mask=np.zeros_like(data[1].loss_mask))])
    return {
        "moved": worst(weights(trainer), before),
        "schedule": trainer.optimizer.steps - steps,
        "skipped": stats.skipped,
        "sequences": stats.sequences,
    }


class Clones(TorchDispatchMode):
    """Counts copies into new memory, of tensors of two dimensions."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default and args[0].dim() == 2
        return func(*args, **(kwargs or {}))


def kept(config: Any, where: Path, folder: Path, data: list[Sequences]) -> dict[str, Any]:
    """What a publish and a resume copy into new memory for pinned and reference weights; the optimizer after a save."""
    tree = config.model_dump()
    tree["training"]["loss"]["kl_coefficient"], tree["pipeline"]["old_logprob"] = 0.1, "pinned"
    both, clones, rests = Config.model_validate(tree), {}, []
    for name, settings in (("plain", config), ("both", both)):
        trainer, path = MegatronTrainer(settings, where), folder / f"checkpoint-{name}"
        step(trainer, data[:1])
        rest = trainer.optimizer.rest
        trainer.optimizer.rest = lambda rest=rest: rests.append(rest())  # type: ignore[method-assign]
        trainer.save(path, {})
        with Clones() as publish:
            trainer.weight_buckets(10_000)
        with Clones() as load:
            trainer.load(path)
        clones[name] = [publish.count, load.count]
    rests.clear()
    (folder / "a-file").touch()
    try:
        trainer.save(folder / "a-file" / "checkpoint", {})
    except NotWritten:
        clones["rests"] = len(rests)
    return clones


def streamed(folder: Path, owners: list[int], model: str = "stream", together: int = 1, **cut: int) -> dict[str, Any]:
    """Two steps of six micro-batches spread unevenly over lockstep domains, `together` in one call, against transformers on
    the whole batch. Judged on rank 0, where whole tensors come out."""
    config = plain.settings(folder / model, dist.get_world_size(), cut=cut)
    trainer, hf = MegatronTrainer(config, folder / model), hf_model(folder / model)
    optimizer = plain.adamw(hf, config)
    grads = norm_off = stats_off = logprobs_off = 0.0
    everyone: list[Any] = []
    for k in range(2):
        whole = plain.near(hf, plain.sequences(18, 40 + k), config.rollout.temperature, 0.3)
        parts = [whole.select(list(range(3 * i, 3 * i + 3))) for i in range(5)]
        parts += [whole.select([15, 16, 17])] if "ep" not in cut else [whole.select([15, 16]), whole.select([17])]
        optimizer.zero_grad()
        total, told = plain.objective(hf, whole, config.training.loss, config)
        total.backward()
        trainer.begin_step()
        mine = [part for part, owner in zip(parts, [*owners, owners[-1]]) if owner == trainer.replica]
        for i in range(0, len(mine), together):
            trainer.accumulate(mine[i : i + together])
        summed = over_domains(trainer)
        if summed:
            summed = {n: g / whole.trained_tokens for n, g in summed.items()}
            grads = max(grads, relative(summed, named(hf, lambda p: p.grad)))
        with torch.no_grad():
            theirs = np.concatenate([plain.logprobs(hf, whole, i, 0.8)[0].numpy() for i in range(whole.count)])
        logprobs_off = max(logprobs_off, float(np.abs(trainer.logprobs(whole) - theirs * whole.loss_mask).max()))
        norm = float(torch.nn.utils.clip_grad_norm_(hf.parameters(), config.training.optimizer.clip_grad_norm))
        optimizer.step()
        stats = trainer.finish_step()
        norm_off = max(norm_off, abs(stats.grad_norm - norm) / norm)
        stats_off = max(stats_off, max(abs(getattr(stats, n) - v) for n, v in told.items()))
        everyone = gathered(stats)
    found = weights(trainer)
    off = worst(found, named(hf, lambda p: p.data)) if found else 0.0
    return {
        "grads": grads,
        "norm": norm_off,
        "stats": stats_off,
        "logprobs": max(gathered(logprobs_off)),
        "weights": off,
        "same": all(s == everyone[0] for s in everyone),
        "poison": not_finite_on_one(trainer),
        "replica": trainer.replica,
        "replicas": trainer.replicas,
    }


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def over_domains(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Gradients of all lockstep domains added up, on rank 0; empty elsewhere."""
    parts = [part for part in gathered(trainer.export_grads()) if part]
    return {n: sum(part[n] for part in parts) for n in parts[0]} if dist.get_rank() == 0 else {}


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
        plain.make_model(folder / "moe", "qwen3_moe", False, 1)
        plain.make_model(folder / "moe-tied", "qwen3_moe", True, 2)
    dist.barrier()
    out: dict[str, Any] = {"uneven": streamed(folder, [0, 0, 1, 0, 1, 0]), "none": streamed(folder, [0] * 6)}
    # with guards' one rank: the same three supervised steps, here half on each replica
    trainer = MegatronTrainer(plain.settings(folder / "guards", 2, schedule="cosine", warm_up_steps=1), folder / "guards")
    trainer.warm_up([supervised()] * 3, 3e-3, 200)
    alone = MegatronTrainer(trainer.config, folder / "warmed")
    warmed = worst(weights(trainer), weights(alone))
    out["experts"] = streamed(folder, [0, 0, 1, 0, 1, 0], "moe")
    return {**out, "saved": {model: reshard_save(folder, model) for model in ("qwen2", "moe")}, "warmed": warmed}


def reshard_save(folder: Path, model: str) -> dict[str, Any]:
    """Two steps, save, two more; what came out goes to files for other layouts to meet."""
    config = plain.settings(folder / model, 2, loss={"kl_coefficient": 0.1})
    trainer = MegatronTrainer(config, folder / model)
    for k in range(2):
        step(trainer, [plain.sequences(4, 70 + k + 10 * trainer.replica)])
    trainer.save(folder / f"{model}-saved", {"at": 2})
    norms = []
    at_save = weights(trainer)
    for k in range(2, 4):
        norms.append(step(trainer, [plain.sequences(4, 70 + k + 10 * trainer.replica)]).grad_norm)
    after = weights(trainer)
    if dist.get_rank() == 0:
        torch.save([at_save, after], folder / f"{model}-saved.pt")
    return {"norms": norms}


def resharded(folder: Path, model: str, **cut: int) -> dict[str, Any]:
    """Load what two replicas saved, go on, export."""
    trainer = MegatronTrainer(plain.settings(folder / model, 2, loss={"kl_coefficient": 0.1}, cut=cut), folder / model)
    extra = trainer.load(folder / f"{model}-saved")
    at_save, after = torch.load(folder / f"{model}-saved.pt")
    loaded = weights(trainer)
    stats = [step(trainer, [plain.sequences(4, 70 + k), plain.sequences(4, 80 + k)]) for k in range(2, 4)]
    now, to = weights(trainer), folder / f"{model}-{cut}"
    trainer.export_hf(to)
    if not now:
        return {}
    return {
        "extra": extra,
        "loaded": worst(loaded, at_save),
        "after": worst(now, after),
        "norms": [s.grad_norm for s in stats],
        "kl": stats[-1].kl,
        "exported": worst(named(hf_model(to), lambda p: p.data), now),
    }


def tp2(folder: Path) -> dict[str, Any]:
    return {"streamed": streamed(folder, [0] * 6, tp=2), "reshard": resharded(folder, "qwen2", tp=2)}


def tp2dp2(folder: Path) -> dict[str, Any]:
    return streamed(folder, [1, 0, 1, 1, 1, 0], tp=2)


def pp2(folder: Path) -> dict[str, Any]:
    return layouts(folder, pp=2)


def cp2(folder: Path) -> dict[str, Any]:
    return layouts(folder, cp=2)


def layouts(folder: Path, **cut: int) -> dict[str, Any]:
    """Two ranks that are one lockstep domain: one micro-batch a call, and four a call."""
    return {
        "one": streamed(folder, [0] * 6, **cut),
        "four": streamed(folder, [0] * 6, "qwen2", together=4, **cut),
        "reshard": resharded(folder, "qwen2", **cut),
    }


def ep2(folder: Path) -> dict[str, Any]:
    return {
        "one": streamed(folder, [0] * 6, "moe", ep=2),
        "four": streamed(folder, [0] * 6, "moe-tied", together=4, ep=2),
        "reshard": resharded(folder, "moe", ep=2),
    }


def pp2ep2(folder: Path) -> dict[str, Any]:
    return {"four": streamed(folder, [0] * 6, "moe-tied", together=4, pp=2, ep=2)}


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
