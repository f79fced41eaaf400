"""Detection of ranks that make no progress, from their heartbeats.

Nothing here knows how heartbeats are sent or what ends a run; that is in `ranks.py`. Times are the observer's own: how
long it has seen no change. Clocks of different machines are never compared. With many ranks they form a tree
(`RankTree`): each one reads the heartbeats of its children and posts a digest of them, so rank 0 need not read all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Seconds without a heartbeat after which others do the work of a rank: they read what it would have read.
GONE_S = 5.0
# The children of a rank in the tree; with no more ranks than that, each reads the heartbeats of all others itself.
_CHILDREN = 32
# The most ranks that a group lists by number.
_LISTED = 8

# The phases of a step, in order.
_ORDER = {phase: number for number, phase in enumerate(("data", "step", "evaluation", "metrics", "save"))}


class Heartbeat(NamedTuple):
    """A rank's report about itself, posted about once a second.

    Attributes:
        beat: Counts the heartbeats; it stops if the process does not run.
        phase: What the rank is doing: "data", "step", "evaluation", "metrics", "save", "load", or the name of a call;
            empty outside the trainer's calls.
        step: The number of its current optimizer step.
        progress_count: Counts progress within a phase: batches, exchanges, files.
        is_waiting: Whether it is waiting for other ranks in an exchange.
        has_ended: Whether this is the last heartbeat.
    """

    beat: int
    phase: str
    step: int
    progress_count: int
    is_waiting: bool
    has_ended: bool = False


class Group(NamedTuple):
    """Ranks in the same phase, summarized in a digest.

    Attributes:
        ranks: The numbers of the first ones.
        count: The number of ranks.
        heartbeat: The latest heartbeat of the first one.
        settled: Seconds that the one that came last has been in this phase of its step.
        idle: Seconds without progress, of the rank with the fewest.
        silent: Seconds without a heartbeat, of the rank with the fewest.
    """

    ranks: tuple[int, ...]
    count: int
    heartbeat: Heartbeat
    settled: float
    idle: float
    silent: float


class Report(NamedTuple):
    """What a rank writes to the store about once a second.

    Attributes:
        heartbeat: Its own state.
        below: Its digest of the ranks below it in the tree.

    >>> first = Heartbeat(3, "step", 1, 8, True)
    >>> report = Report(Heartbeat(3, "data", 1, 7, False), (Group((5, 6), 2, first, 4.0, 3.0, 0.0),))
    >>> Report.from_json(*report.to_json()) == report
    True
    """

    heartbeat: Heartbeat
    below: tuple[Group, ...] = ()

    def to_json(self) -> tuple[Heartbeat, list[list[object]]]:
        """Return it as lists and numbers, which JSON can hold."""
        return self.heartbeat, [[*group[:3], *(round(seconds, 1) for seconds in group[3:])] for group in self.below]

    @classmethod
    def from_json(cls, heartbeat: Sequence[Any], below: Sequence[Sequence[Any]]) -> Report:
        """Return the report of which `to_json` returned this."""
        groups = (Group(tuple(ranks), count, Heartbeat(*first), *seconds) for ranks, count, first, *seconds in below)
        return cls(Heartbeat(*heartbeat), tuple(groups))


class Stall(NamedTuple):
    """A rank that makes no progress, for which others may be waiting.

    Attributes:
        rank: Its number.
        heartbeat: Its latest heartbeat.
        seconds: How long that has not changed, or how long there was none.
        is_silent: Whether its heartbeats have stopped: its process does not run.
        more: How many more ranks, whose numbers are not known, are in the same state.
    """

    rank: int
    heartbeat: Heartbeat
    seconds: float
    is_silent: bool
    more: int = 0

    @property
    def may_end_run(self) -> bool:
        """Whether this may end a run: the user's code outside the trainer may take any time."""
        return bool(self.heartbeat.phase) or self.is_silent


class StallDetector:
    """Judges ranks by their heartbeats.

    >>> detector, waiting = StallDetector(), Heartbeat(0, "step", 12, 70, True)
    >>> for second in range(41):
    ...     _ = detector.update({0: waiting._replace(beat=second), 1: Heartbeat(second, "data", 12, 69, False)}, 1.0)
    >>> [(stall.rank, stall.heartbeat.phase, stall.seconds) for stall in detector.stalled(30.0)]
    [(1, 'data', 40.0)]
    """

    def __init__(self) -> None:
        self._heartbeats: dict[int, Heartbeat] = {}
        # How long the progress of a rank has not changed.
        self._idle: dict[int, float] = {}
        # How long it has been in the same phase of the same step.
        self._settled: dict[int, float] = {}
        # How long a rank has sent no heartbeat.
        self._silent: dict[int, float] = {}
        # The longest time that a rank was in a phase before it continued.
        self._longest: dict[str, float] = {}
        # The last stall that was reported of a rank.
        self._reported: dict[int, Stall] = {}
        # The latest digests, by the rank that has made them.
        self._below: dict[int, tuple[Group, ...]] = {}

    def update(
        self,
        heartbeats: Mapping[int, Heartbeat],
        elapsed: float,
        below: Mapping[int, tuple[Group, ...]] | None = None,
    ) -> list[str]:
        """Record the latest heartbeats; return a line for each rank that continues after it was reported.

        Args:
            heartbeats: The latest heartbeat of each rank; ranks that are no longer among them are forgotten.
            elapsed: Seconds since the last call in which the observer itself was running.
            below: The latest digests of some of these ranks.
        """
        lines = []
        self._below = {rank: groups for rank, groups in (below or {}).items() if groups}
        for rank in [rank for rank in self._heartbeats if rank not in heartbeats]:
            for by_rank in (self._heartbeats, self._idle, self._settled, self._silent):
                del by_rank[rank]
        for rank, current in heartbeats.items():
            is_new = rank not in self._heartbeats
            previous = self._heartbeats.get(rank, current)
            silent = self._silent.get(rank, 0.0)
            self._silent[rank] = 0.0 if is_new or current.beat != previous.beat else silent + elapsed
            has_moved = is_new or (current.phase, current.step) != (previous.phase, previous.step)
            self._settled[rank] = 0.0 if has_moved else self._settled[rank] + elapsed
            if is_new or current[1:] != previous[1:] or current.has_ended:
                idle = max(self._idle.get(rank, 0.0), silent)
                self._longest[previous.phase] = max(self._longest.get(previous.phase, 0.0), idle)
                if not is_new and self._reported.pop(rank, None) is not None and not current.has_ended:
                    lines.append(f"Rank {rank} continues after {idle:.0f} s in {_phase_name(previous)}.")
                self._idle[rank] = 0.0
            else:
                self._idle[rank] += elapsed
            self._heartbeats[rank] = current
        return lines + self._pop_resumed()

    def _pop_resumed(self) -> list[str]:
        """Return a line for each rank that continues after it was reported, of those that are known by digests."""
        lines: list[str] = []
        known = {rank: group for group in self._groups() for rank in group.ranks} if self._reported else {}
        for rank, stall in [*self._reported.items()]:
            group = known.get(rank)
            if rank not in self._heartbeats and (group is None or max(group.idle, group.silent) < stall.seconds):
                del self._reported[rank]
                phase = _phase_name(stall.heartbeat)
                lines.append(f"Rank {rank} continues after {stall.seconds:.0f} s or more in {phase}.")
        return lines

    def _groups(self) -> list[Group]:
        """Return all known ranks: each one by itself, and those of digests in groups."""
        singles = [
            Group((rank,), 1, heartbeat, self._settled[rank], self._idle[rank], self._silent[rank])
            for rank, heartbeat in self._heartbeats.items()
        ]
        return singles + [group for rank, groups in self._below.items() if not self.is_gone(rank) for group in groups]

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank has sent no heartbeat for some seconds, so that its digest is out of date."""
        return self._silent.get(rank, 0.0) >= GONE_S

    def digest(self) -> tuple[Group, ...]:
        """Return what is known, in as many groups as there are phases with ranks in them."""
        groups: dict[tuple[object, ...], Group] = {}
        for group in self._groups():
            heartbeat, silent = group.heartbeat, group.silent if group.silent >= GONE_S else 0.0
            # Ranks that are silent, or outside the trainer, are judged one by one: they need similar times.
            times = (silent // GONE_S, 0.0 if heartbeat.phase else group.idle // GONE_S)
            key = (heartbeat.phase, heartbeat.step, heartbeat.is_waiting, heartbeat.has_ended, *times)
            groups[key] = _merge(groups[key], group) if key in groups else group
        return tuple(groups.values())

    def stalled(self, seconds: float) -> list[Stall]:
        """Return the ranks for which all others wait, if nothing has moved for this many seconds.

        These are the ranks whose processes do not run; if all run, those that do not wait themselves, and of these the
        ones furthest behind.
        """
        present = [group for group in self._groups() if not group.heartbeat.has_ended]
        inside = [group for group in present if group.heartbeat.phase]
        if not inside or any(group.settled < seconds for group in inside):
            return []
        chosen = [group for group in present if group.silent >= seconds]
        if not chosen and any(group.idle < seconds for group in inside):
            return []
        if not chosen:
            chosen = [group for group in inside if not group.heartbeat.is_waiting]
            least = min((_progress(group.heartbeat) for group in chosen), default=None)
            chosen = [group for group in chosen if _progress(group.heartbeat) == least]
        if not chosen:
            chosen = [group for group in present if not group.heartbeat.phase and group.idle >= seconds] or inside
        stalls = []
        for group in chosen:
            is_silent = group.silent >= seconds
            for rank in group.ranks:
                more = group.count - len(group.ranks) if rank == group.ranks[-1] else 0
                duration = group.silent if is_silent else group.idle
                stalls.append(Stall(rank, group.heartbeat, duration, is_silent, more))
        return sorted(stalls, key=lambda stall: stall.rank)

    def due(self, seconds: float) -> list[Stall]:
        """Return those of `stalled` to report now: less and less often, and not if it has taken as long before."""
        stalls = []
        for stall in self.stalled(seconds):
            usual = 0.0 if stall.is_silent else 2 * self._longest.get(stall.heartbeat.phase, 0.0)
            previous = self._reported.get(stall.rank)
            if stall.seconds >= max(2 * previous.seconds if previous else 0.0, usual):
                self._reported[stall.rank] = stall
                stalls.append(stall)
        return stalls

    @property
    def has_reported(self) -> bool:
        """Whether a rank was reported and has not continued."""
        return bool(self._reported)

    def are_reported(self, stalls: Sequence[Stall]) -> bool:
        """Return whether all of these were reported and have not moved since."""
        return all(stall.rank in self._reported for stall in stalls)

    def first_alive(self, seconds: float) -> int:
        """Return the first rank that has sent a heartbeat within this many seconds."""
        return min((rank for rank in self._heartbeats if self._silent[rank] < seconds), default=-1)

    def reset(self) -> None:
        """Forget all heartbeats, but not the longest times of phases."""
        for by_rank in (self._heartbeats, self._idle, self._settled, self._silent, self._reported, self._below):
            by_rank.clear()


class RankTree:
    """The ranks as a tree: which reports one of them reads, and its digest of them.

    Rank 0 is at the top. A rank reads the reports of its children, and posts a digest of what it sees and of their
    digests. Where a child is gone, its own children are read instead. A rank above which all are gone does the work of
    rank 0, and reads what rank 0 would have read. So each rank reads some 64 reports in a second at most, the store
    answers for about three reports a rank, and rank 0 knows of each rank within seconds. With few ranks, all read all.

    Args:
        rank: The rank that reads.
        size: The number of all ranks.

    Attributes:
        is_deep: Whether rank 0 knows some ranks only by digests.
        all_ranks: All ranks, as seen from rank 0; only a rank that judges keeps this up to date.

    >>> tree = RankTree(40, 1024)
    >>> tree.ancestors, tree.ranks_to_read(judges=False), RankTree(1, 1024).ranks_to_read(judges=False)[:4]
    ((1, 0), [1, 0], [33, 34, 35, 36])
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.is_deep: bool = size > 1 + _CHILDREN
        self.ancestors: tuple[int, ...] = tuple(_ancestors(rank))
        self.all_ranks: StallDetector = StallDetector()
        self._above = StallDetector()
        self._below = StallDetector()

    @property
    def is_top(self) -> bool:
        """Whether this rank does the work of rank 0; with few ranks, all do."""
        return not self.is_deep or all(self._above.is_gone(rank) for rank in self.ancestors)

    def ranks_to_read(self, judges: bool) -> list[int]:
        """Return the ranks whose reports are to be read, each once.

        Args:
            judges: Whether this rank needs to know of all ranks.
        """
        below = self._children(self._below, self.rank) if self.is_deep and self.rank else ()
        every = (0, *self._children(self.all_ranks, 0)) if judges else ()
        return list(dict.fromkeys((*below, *self.ancestors, *every)))

    def update(self, reports: Mapping[int, Report], elapsed: float, judges: bool) -> list[str]:
        """Record the reports of `ranks_to_read`; return lines as `StallDetector.update` does."""

        def record(detector: StallDetector, ranks: Iterator[int] | Sequence[int]) -> list[str]:
            read = {rank: reports[rank] for rank in ranks if rank in reports}
            below = {rank: report.below for rank, report in read.items() if rank}
            return detector.update({rank: report.heartbeat for rank, report in read.items()}, elapsed, below)

        record(self._above, self.ancestors)
        if self.is_deep and self.rank:
            record(self._below, [*self._children(self._below, self.rank)])
        if not judges:
            self.all_ranks.reset()
            return []
        return record(self.all_ranks, [0, *self._children(self.all_ranks, 0)])

    def digest(self) -> tuple[Group, ...]:
        """Return the digest of the ranks below this one; none at the top, where nobody would read it."""
        return self._below.digest() if self.is_deep and self.rank else ()

    def _children(self, detector: StallDetector, rank: int) -> Iterator[int]:
        """Yield the children of a rank, and in turn those of each child that is gone."""
        for child in range(rank * _CHILDREN + 1, min((rank + 1) * _CHILDREN + 1, self.size)):
            yield child
            if detector.is_gone(child):
                yield from self._children(detector, child)


def _ancestors(rank: int) -> Iterator[int]:
    while rank:
        rank = (rank - 1) // _CHILDREN
        yield rank


def _merge(group: Group, other: Group) -> Group:
    """Return two groups of ranks in the same phase as one."""
    first, second = sorted((group, other), key=lambda group: group.ranks)
    ranks = tuple(sorted((*group.ranks, *other.ranks))[:_LISTED])
    least = (min(pair) for pair in zip(group[3:], other[3:], strict=True))
    return Group(ranks, first.count + second.count, first.heartbeat, *least)


def describe_stall(stall: Stall) -> str:
    """Describe a rank that makes no progress in a sentence."""
    phase, step = _phase_name(stall.heartbeat), f" (step {stall.heartbeat.step})" if stall.heartbeat.step else ""
    if not stall.is_silent:
        return f"Rank {stall.rank} has been in {phase} for {stall.seconds:.0f} s{step}."
    return (
        f"Rank {stall.rank} has sent no heartbeat for {stall.seconds:.0f} s, and was in {phase}{step} before: "
        "its process is stopped, swapped out, cut off or gone."
    )


def _phase_name(heartbeat: Heartbeat) -> str:
    return repr(heartbeat.phase) if heartbeat.phase else "the program around the trainer"


def _progress(heartbeat: Heartbeat) -> tuple[int, int]:
    """Return the progress of a rank, for comparison."""
    return heartbeat.step, _ORDER.get(heartbeat.phase, len(_ORDER))
