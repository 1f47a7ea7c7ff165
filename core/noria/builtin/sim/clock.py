"""Virtual time: the host's clock, and the engines of a device as resources that are busy or free."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter

_START, _END = itemgetter(0), itemgetter(1)


class VirtualClock:
    """The host's virtual time. Devices of one backend share it, as they share a host."""

    def __init__(self) -> None:
        self.now_ns = 0

    def advance(self, duration_ns: int) -> None:
        self.now_ns += duration_ns

    def advance_to(self, time_ns: int) -> None:
        """Block the host until `time_ns`; a moment in the past changes nothing."""
        self.now_ns = max(self.now_ns, time_ns)


class Lane:
    """One engine: the compute units, or one direction of the link. It does one thing at a time.

    Work takes whatever time earlier submissions have left free, so two queues that use one lane share its rate and a
    copy that waits for an event does not hold up the copies of another queue.

    Attributes:
        busy_ns: how long it has been, or will be, busy with all that was submitted.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._busy: list[tuple[int, int]] = []  # [start, end) in order, disjoint, all ending after the clock's now
        self.busy_ns = 0

    def reserve(self, earliest_ns: int, duration_ns: int) -> tuple[int, int]:
        """Take `duration_ns` of free time from `earliest_ns` (not in the host's past) on.

        Returns:
            When the work begins and ends.
        """
        busy = self._busy
        del busy[: bisect_right(busy, self._clock.now_ns, key=_END)]
        if duration_ns <= 0:
            return earliest_ns, earliest_ns
        first = i = bisect_left(busy, earliest_ns, key=_END)  # the first interval that ends at `earliest_ns` or later
        time, left, begin = earliest_ns, duration_ns, -1
        while left > 0:
            gap_end = busy[i][0] if i < len(busy) else time + left
            if gap_end > time:
                begin = time if begin < 0 else begin
                taken = min(left, gap_end - time)
                time += taken
                left -= taken
            if left > 0:
                time = busy[i][1]
                i += 1
        # From `begin` to `time` every gap is filled now: what lies between is one interval.
        last = bisect_right(busy, time, lo=first, key=_START)
        first = bisect_left(busy, begin, lo=first, key=_END)
        start = min(begin, busy[first][0]) if first < last else begin
        end = max(time, busy[last - 1][1]) if first < last else time
        busy[first:last] = [(start, end)]
        self.busy_ns += duration_ns
        return begin, time
