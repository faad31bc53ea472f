"""The coordinator's loop: does it let the tasks beside it run, however much MPI brings?"""

from __future__ import annotations

import asyncio

from rpipe.rollout.driver import RolloutDriver


def bare() -> RolloutDriver:
    driver = object.__new__(RolloutDriver)
    driver._woken = asyncio.Event()
    return driver


def test_a_message_of_mpi_at_every_look_does_not_keep_the_loops_other_tasks_from_running():
    async def main() -> list[int]:
        driver, ran = bare(), []
        asyncio.get_running_loop().call_soon(ran.append, 1)
        driver._woken.set()  # as a message does that the crank received
        await driver._pause()
        return list(ran)

    assert asyncio.run(main()) == [1]


def test_what_the_ranks_own_tasks_say_wakes_it_before_mpi_is_asked_again(monkeypatch):
    async def main() -> None:
        driver = bare()
        asyncio.get_running_loop().call_later(0.05, driver._woken.set)
        await asyncio.wait_for(driver._pause(), 30)

    monkeypatch.setattr("rpipe.rollout.driver.POLL_S", 3600.0)
    asyncio.run(main())
