"""The schedule: which stream runs a task, and in which order. TensorRT-LLM's rules.

A task's priority is the longest path from its beginning to the end of the piece. The ready task with the highest priority is
taken next; it goes to a stream that is free by the time its inputs are ready, else to the least loaded one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduledTask:
    """A task on a stream: stream 0 is the caller's. Times in microseconds, as far as costs are."""

    task: int
    stream: int
    start: float
    end: float


def priorities(costs: Sequence[float], dependencies: Sequence[Mapping[int, object]]) -> list[float]:
    """For each task, the cost of the most expensive path from its beginning to the end. Tasks come after those before them."""
    longest = list(costs)
    for task in reversed(range(len(costs))):
        for earlier in dependencies[task]:
            longest[earlier] = max(longest[earlier], costs[earlier] + longest[task])
    return longest


def schedule(
    costs: Sequence[float],
    dependencies: Sequence[Mapping[int, object]],
    num_streams: int,
    event: float = 0.0,
    pinned: Collection[int] = (),
) -> list[ScheduledTask]:
    """Tasks onto streams, in the order in which they are launched: each after the tasks that it must wait for.

    Args:
        costs: of each task.
        dependencies: for each task, the earlier tasks that it must wait for.
        num_streams: at least 1.
        event: what it costs to wait for another stream.
        pinned: tasks that run on the caller's stream, such as collectives: all pieces share that one.
    """
    priority = priorities(costs, dependencies)
    awaited = {earlier for each in dependencies for earlier in each}
    free = [0.0] * num_streams
    placed: dict[int, ScheduledTask] = {}
    waiting = set(range(len(costs)))
    while waiting:
        ready = [task for task in waiting if all(earlier in placed for earlier in dependencies[task])]
        task = min(ready, key=lambda each: (-priority[each], each))
        waiting.discard(task)
        inputs = [placed[earlier] for earlier in dependencies[task]]
        begins = [
            max(
                [
                    free[stream],
                    *(scheduled.end + (event if scheduled.stream != stream else 0.0) for scheduled in inputs),
                ]
            )
            for stream in range(num_streams)
        ]
        # The caller's stream must wait for whatever comes last on another one.
        start_costs = [
            begin + (event if stream and task not in awaited else 0.0) for stream, begin in enumerate(begins)
        ]
        preferred = max(inputs, key=lambda scheduled: scheduled.end).stream if inputs and task in awaited else 0
        ends = max((scheduled.end for scheduled in inputs), default=0.0)
        stream = 0 if task in pinned else _stream(free, ends, start_costs, preferred)
        placed[task] = ScheduledTask(task, stream, begins[stream], begins[stream] + costs[task])
        free[stream] = placed[task].end
    return list(placed.values())


def _stream(free: Sequence[float], ready: float, start_costs: Sequence[float], preferred: int) -> int:
    """A stream that is free by `ready`: the cheapest, rather `preferred`, rather one that was busy until lately; where none is,
    the one that is free first."""
    idle = [stream for stream, until in enumerate(free) if until <= ready]
    if not idle:
        return min(range(len(free)), key=lambda stream: (free[stream], stream))
    return min(idle, key=lambda stream: (start_costs[stream], stream != preferred, -free[stream], stream))
