"""How do the trainer's weights reach the engines, whichever of them live?

Each engine has an update group of its own with the trainer: rank 0 is the trainer, the others are the engine's workers. A
group is made at the publish in which an engine first takes part and used until that engine is lost; one engine's loss
touches nobody else's group. All engines receive at once, bucket by bucket. An engine that does not take a bucket within
engine.stall_deadline_s is left out, and started again from the snapshot of this very version.

The cost: the trainer's rank sends the model once to each engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rpipe.config import Config
from rpipe.core.types import Version
from rpipe.runtime.messages import Join, Message, Published, TensorEntry
from rpipe.runtime.side_group import dial_store, leave, serve_store, side_group, weights_group
from rpipe.training.snapshot import Snapshots
from rpipe.training.trainer import WeightSpec, cut

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(slots=True)
class Member:
    """An engine in one of its lives."""

    life: int
    group: dist.ProcessGroup
    reason: str = ""  # why it is left out of the publish at work


class Publisher:
    """Of the training coordinator's rank. `meet` the engines that take a version, then `publish` it."""

    def __init__(self, config: Config, address: str, specs: list[WeightSpec], snapshots: Snapshots) -> None:
        self._config, self._address, self._snapshots = config, address, snapshots
        self._store = serve_store(address, config.limits.collective_s)
        self._members: dict[int, Member] = {}
        self._absent: list[tuple[int, int, str]] = []
        buckets = cut(specs, config.channel.weight_bucket_bytes)
        self._buckets = tuple(tuple(TensorEntry(*spec) for spec in bucket) for bucket in buckets)

    def meet(self, takers: tuple[tuple[int, int], ...], send: Callable[[Message], None]) -> None:
        """Groups with exactly these (engine, life); `send` brings a Join to its engine at once. Those without a group yet are
        waited for together: for engine.stall_deadline_s, however many of them are dead."""
        lives = dict(takers)
        for engine in [e for e, member in self._members.items() if lives.get(e) != member.life]:
            leave(self._members.pop(engine).group)
        new = [(engine, life) for engine, life in takers if engine not in self._members]
        tp, port = self._config.engine.tp, self._store.port
        for engine, life in new:
            group = weights_group(engine, life)
            send(Join(engine, life, group, self._address, port, 1 + tp, self._config.backend, self._buckets))
        self._absent = []
        if not new:
            return
        with ThreadPoolExecutor(len(new), "join") as pool:
            joins = [pool.submit(self._group, engine, life) for engine, life in new]
        waited = f"engines {', '.join(str(engine) for engine, _ in new)} were waited for"
        for (engine, life), join in zip(new, joins):
            try:
                self._members[engine] = Member(life, join.result())
            except RuntimeError as error:
                told = _told(engine, f"did not join the broadcast of weights ({waited})", error)
                self._absent.append((engine, life, told))

    def _group(self, engine: int, life: int) -> dist.ProcessGroup:
        config = self._config
        timeout_s = config.engine.stall_deadline_s
        return side_group(
            self._address, self._store.port, 1 + config.engine.tp, 0, weights_group(engine, life), config.backend,
            timeout_s, dial_store(self._address, self._store.port, timeout_s),
        )  # fmt: skip

    def publish(self, version: Version, buckets: Iterator[list[tuple[str, torch.Tensor]]]) -> tuple[Published, int]:
        """Every weight to every engine and to the snapshot; what is to be told, and the model's bytes."""
        import torch.distributed as dist

        nbytes = 0
        self._snapshots.begin(version)
        for bucket in buckets:
            tensors = [tensor.contiguous() for _, tensor in bucket]
            nbytes += sum(t.nbytes for t in tensors)
            sent = []
            for engine, member in self._members.items():
                if not member.reason:
                    with self._left_out(engine):
                        for t in tensors:
                            sent.append((engine, dist.broadcast(t, group=member.group, group_src=0, async_op=True)))
            self._snapshots.add(bucket)
            for engine, handle in sent:
                with self._left_out(engine):
                    handle.wait()
        fingerprint = self._snapshots.end()
        failed = tuple((e, m.life, m.reason) for e, m in self._members.items() if m.reason)
        for engine, _, _ in failed:
            leave(self._members.pop(engine).group)
        return Published(version, fingerprint, (*self._absent, *failed)), nbytes

    @contextmanager
    def _left_out(self, engine: int) -> Iterator[None]:
        """What fails there is that engine's affair: it is told, and the publish goes on without it."""
        try:
            yield
        except RuntimeError as error:  # torch's DistError is one
            member = self._members[engine]
            member.reason = member.reason or _told(engine, "did not take the weights", error)

    def close(self) -> None:
        for member in self._members.values():
            leave(member.group)
        self._members.clear()
        self._snapshots.close()


def _told(engine: int, what: str, error: Exception) -> str:
    return f"engine {engine} {what}: {(str(error).splitlines() or [type(error).__name__])[0]}"
