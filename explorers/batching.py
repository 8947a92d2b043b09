"""Gathers the requests of many attempts into one engine call.

A batch leaves when every live attempt waits for the engine. Where some attempt is busy elsewhere (a tool, a judge), the
batch leaves after a short quiet time. Requests are put in order of their key first, so that what an engine call holds
depends on the attempts and not on the scheduling of coroutines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from buffer_engine.errors import RolloutError
from explorers.base import Generation, GenerationRequest


@dataclass(frozen=True, slots=True)
class _Waiting:
    key: tuple[int, int]
    request: GenerationRequest
    reply: asyncio.Future[Generation]


class BatchGatherer:
    """One engine shared by the attempts of one chunk, inside one event loop.

    Args:
        generate: the engine's call; runs in a thread of its own, one call at a time.
        live: how many attempts there are; each must call `leave` once when it ends.
        quiet_seconds: how long nobody must have joined before an incomplete batch leaves.
    """

    def __init__(
        self,
        generate: Callable[[Sequence[GenerationRequest], Callable[[int], bool]], list[Generation]],
        *,
        live: int,
        quiet_seconds: float = 0.05,
    ) -> None:
        self._generate = generate
        self._live = live
        self._quiet_seconds = quiet_seconds
        self._waiting: list[_Waiting] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="buffer-engine-generate")
        self._running: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def submit(self, key: tuple[int, int], request: GenerationRequest) -> Generation:
        """Wait for the reply to one request; `key` orders requests inside a batch.

        Raises:
            RolloutError: kind `engine`: the engine's call failed as a whole.
        """
        reply: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        entry = _Waiting(key, request, reply)
        self._waiting.append(entry)
        self._consider()
        try:
            return await reply
        finally:
            # A caller that gave up before its batch left must not be decoded for nobody.
            if entry in self._waiting:
                self._waiting.remove(entry)

    def leave(self) -> None:
        """One attempt has ended and will not ask again."""
        self._live -= 1
        self._consider()

    async def close(self) -> None:
        """Stop: nothing new leaves, the running call is told to give up and waited for."""
        self._closed = True
        self._cancel_timer()
        for entry in self._waiting:
            entry.reply.cancel()
        if self._running is not None:
            await asyncio.wait([self._running])
        self._thread.shutdown(wait=True)

    def _consider(self) -> None:
        self._cancel_timer()
        if self._closed or self._running is not None or not self._waiting:
            return
        if len(self._waiting) >= self._live:
            self._depart()
        else:
            # Starting the clock anew at every arrival means it can only run out when nothing is ready to run.
            self._timer = asyncio.get_running_loop().call_later(self._quiet_seconds, self._depart)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _depart(self) -> None:
        self._timer = None
        batch = sorted(self._waiting, key=lambda entry: entry.key)
        self._waiting.clear()
        self._running = asyncio.get_running_loop().create_task(self._call(batch))

    async def _call(self, batch: Sequence[_Waiting]) -> None:
        def given_up(index: int) -> bool:
            return self._closed or batch[index].reply.done()

        requests = [entry.request for entry in batch]
        loop = asyncio.get_running_loop()
        try:
            generations = await loop.run_in_executor(self._thread, self._generate, requests, given_up)
            if len(generations) != len(batch):
                raise ValueError(f"{len(batch)} requests went in and {len(generations)} replies came out")
        except Exception as error:  # noqa: BLE001  an engine fails in any way it likes; every waiting attempt hears of it
            for entry in batch:
                if not entry.reply.done():
                    entry.reply.set_exception(RolloutError("engine", f"{type(error).__name__}: {error}"))
        else:
            for entry, generation in zip(batch, generations, strict=True):
                if not entry.reply.done():
                    entry.reply.set_result(generation)
        finally:
            self._running = None
            self._consider()
