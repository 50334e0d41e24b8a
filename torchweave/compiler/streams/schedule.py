"""List scheduling of tasks onto streams, by TensorRT-LLM's rules.

A task's priority is the longest path from its start to the end of the piece. The ready task with the highest priority is next,
on a stream that is free when its inputs are ready, else on the stream that is free first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduledTask:
    """A task on a stream; stream 0 is the caller's. Times in microseconds or in cost weights."""

    task: int
    stream: int
    start: float
    end: float


def priorities(costs: Sequence[float], dependencies: Sequence[Mapping[int, object]]) -> list[float]:
    """For each task, the cost of the longest path from its start to the end. Tasks are in topological order."""
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
    """Assign tasks to streams; returns them in launch order, each after its dependencies.

    Args:
        costs: cost of each task.
        dependencies: for each task, the earlier tasks that it waits for.
        num_streams: at least 1.
        event: cost of a wait for another stream.
        pinned: tasks that must run on the caller's stream, which all pieces share, such as collectives.
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
            max([until, *(each.end + (event if each.stream != stream else 0.0) for each in inputs)])
            for stream, until in enumerate(free)
        ]
        # The caller's stream must wait for the last task of each other stream.
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
    """The cheapest stream that is free at `ready`, ties by `preferred`, then by the latest to become free; if none is free, the
    first to become free."""
    idle = [stream for stream, until in enumerate(free) if until <= ready]
    if not idle:
        return min(range(len(free)), key=lambda stream: (free[stream], stream))
    return min(idle, key=lambda stream: (start_costs[stream], stream != preferred, -free[stream], stream))
