"""What happens next, and when? An event heap with a virtual clock.

What is due at the same time happens in the order in which it was asked for, so that two simulations of one seed are the same.
`Host` shares cores among those who compute on them: work is given in seconds of a free machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Timer:
    """Something due; `cancel` takes it back."""

    __slots__ = ("action",)

    def __init__(self, action: Action | None) -> None:
        self.action = action

    def cancel(self) -> None:
        self.action = None


class Kernel:
    """`run` until nothing is due, or somebody sets `stopped`. O(log n) an action."""

    def __init__(self) -> None:
        self.now = 0.0
        self.actions = 0
        self.stopped = False
        self._heap: list[tuple[float, int, Timer]] = []
        self._asked = 0

    def at(self, t: float, action: Action) -> Timer:
        """Do it at `t`, or now if `t` is past."""
        timer = Timer(action)
        self._asked += 1
        heapq.heappush(self._heap, (max(t, self.now), self._asked, timer))
        return timer

    def after(self, seconds: float, action: Action) -> Timer:
        return self.at(self.now + seconds, action)

    def run(self, watch: Callable[[], None] | None = None, every: int = 10_000) -> None:
        """`watch` is called once in `every` actions."""
        heap = self._heap
        while heap and not self.stopped:
            t, _, timer = heapq.heappop(heap)
            if timer.action is None:
                continue
            self.now = t
            self.actions += 1
            timer.action()
            if watch is not None and self.actions % every == 0:
                watch()


class Job:
    """Work on a host; `work_s` in all, in seconds of a free machine."""

    __slots__ = ("cores", "done", "done_s", "since_t", "speed", "timer", "weight", "work_s")

    def __init__(self, work_s: float, cores: float, done: Action, now: float, weight: float) -> None:
        self.work_s, self.cores, self.done, self.weight = work_s, cores, done, weight
        self.done_s, self.since_t, self.speed = 0.0, now, 1.0
        self.timer = Timer(None)


class Host:
    """Everyone at full speed while the cores suffice (`cores` None: always), else at speeds in proportion to their weights.

    O(1) a job without a limit, O(jobs) with one.
    """

    def __init__(self, kernel: Kernel, cores: float | None = None) -> None:
        self.kernel, self.cores = kernel, cores
        self._jobs: dict[Job, None] = {}

    def start(self, work_s: float, cores: float, done: Action, weight: float = 1.0) -> Job:
        """`done` is called when the work is done."""
        job = Job(work_s, cores, done, self.kernel.now, weight)
        if self.cores is not None:
            self._jobs[job] = None
            self._share()
        self._arm(job)
        return job

    def worked_s(self, job: Job) -> float:
        """How much of its work is done by now."""
        return job.done_s + (self.kernel.now - job.since_t) * job.speed

    def cancel(self, job: Job) -> None:
        """It will never be done."""
        job.timer.cancel()
        if self.cores is not None:
            del self._jobs[job]
            self._share()

    def change(self, job: Job, work_s: float) -> None:
        """It now is `work_s` in all; what is done stays done."""
        self._settle(job)
        job.work_s = work_s
        self._arm(job)

    def _settle(self, job: Job) -> None:
        job.done_s = self.worked_s(job)
        job.since_t = self.kernel.now

    def _arm(self, job: Job) -> None:
        job.timer.cancel()
        job.timer = self.kernel.after(max(job.work_s - job.done_s, 0.0) / job.speed, lambda: self._end(job))

    def _end(self, job: Job) -> None:
        if self.cores is not None:
            del self._jobs[job]
            self._share()
        job.done()

    def _share(self) -> None:
        assert self.cores is not None
        for job, speed in _speeds(list(self._jobs), self.cores):
            if speed != job.speed:
                self._settle(job)
                job.speed = speed
                self._arm(job)


def _speeds(jobs: list[Job], cores: float) -> list[tuple[Job, float]]:
    """Nobody above full speed; what they leave is the others'."""
    full: list[Job] = []
    slowed = jobs
    while slowed:
        share = (cores - sum(job.cores for job in full)) / sum(job.weight * job.cores for job in slowed)
        fast = [job for job in slowed if share * job.weight >= 1.0]
        if not fast:
            return [*((job, 1.0) for job in full), *((job, share * job.weight) for job in slowed)]
        full += fast
        slowed = [job for job in slowed if share * job.weight < 1.0]
    return [(job, 1.0) for job in full]
