"""Ranks that make no progress: which, where and for how long, as seen from their posts.

Nothing here knows how posts are sent or what ends a run; that is in `distributed.py`. Times are the observer's own: how
long it has seen no change. Clocks of different machines are never compared. With many ranks they form a tree (`Tree`),
in which each one reads the posts of its children and posts a digest of them, so rank 0 need not read all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

GONE_S = 5.0
"""Seconds without a post after which others do the work of a rank: they read what it would have read."""
_CHILDREN = 32
"""The children of a rank in the tree; with no more ranks than that, each reads the posts of all others itself."""
_LISTED = 8
"""The most ranks that a group lists by number."""

_ORDER = {place: number for number, place in enumerate(("data", "step", "evaluation", "metrics", "save"))}
"""The places of a step, in order."""


class Post(NamedTuple):
    """A rank's report about itself, posted about once a second.

    Attributes:
        beat: Counts the posts; it stops if the process does not run.
        place: What the rank is doing: "data", "step", "evaluation", "metrics", "save", "load", or the name of a call;
            empty outside the trainer's calls.
        step: The number of its current optimizer step.
        moves: Counts progress within a place: batches, exchanges, files.
        waits: Whether it is waiting for other ranks in an exchange.
        has_ended: Whether this is the last post.
    """

    beat: int
    place: str
    step: int
    moves: int
    waits: bool
    has_ended: bool = False


class Group(NamedTuple):
    """Ranks at the same place, of which a digest tells together.

    Attributes:
        ranks: Their numbers, of the first ones.
        count: How many there are.
        post: The latest post of the first one.
        settled: Seconds that the one that came last has been at its place of its step.
        still: Seconds without progress, of the rank with the fewest.
        silent: Seconds without a post, of the rank with the fewest.
    """

    ranks: tuple[int, ...]
    count: int
    post: Post
    settled: float
    still: float
    silent: float


class Report(NamedTuple):
    """What a rank puts into the store about once a second.

    Attributes:
        post: Where it is itself.
        below: Its digest of the ranks below it in the tree.

    >>> report = Report(Post(3, "data", 1, 7, False), (Group((5, 6), 2, Post(3, "step", 1, 8, True), 4.0, 3.0, 0.0),))
    >>> Report.of(*report.plain()) == report
    True
    """

    post: Post
    below: tuple[Group, ...] = ()

    def plain(self) -> tuple[Post, list[list[object]]]:
        """Return it as lists and numbers, which JSON can hold."""
        return self.post, [[*group[:3], *(round(seconds, 1) for seconds in group[3:])] for group in self.below]

    @classmethod
    def of(cls, post: Sequence[object], below: Sequence[Sequence[object]]) -> Report:
        """Return the report of which `plain` returned this."""
        groups = (Group(tuple(ranks), count, Post(*of_first), *seconds) for ranks, count, of_first, *seconds in below)  # type: ignore[arg-type]
        return cls(Post(*post), tuple(groups))  # type: ignore[arg-type]


class Stall(NamedTuple):
    """A rank that makes no progress, for which others may be waiting.

    Attributes:
        rank: Its number.
        post: Its latest post.
        seconds: How long that has not changed, or how long there was no post.
        is_silent: Whether it has stopped posting: its process does not run.
        others: How many more ranks are in the same state, of which the number is not known.
    """

    rank: int
    post: Post
    seconds: float
    is_silent: bool
    others: int = 0

    @property
    def may_end(self) -> bool:
        """Whether this may end a run: the user's code outside the trainer may take any time."""
        return bool(self.post.place) or self.is_silent


class Stalls:
    """Judges ranks by their posts.

    >>> stalls, waits = Stalls(), Post(0, "step", 12, 70, True)
    >>> for second in range(41):
    ...     _ = stalls.look({0: waits._replace(beat=second), 1: Post(second, "data", 12, 69, False)}, 1.0)
    >>> [(stall.rank, stall.post.place, stall.seconds) for stall in stalls.found(30.0)]
    [(1, 'data', 40.0)]
    """

    def __init__(self) -> None:
        self._posts: dict[int, Post] = {}
        self._still: dict[int, float] = {}
        """How long the progress of a rank has not changed."""
        self._settled: dict[int, float] = {}
        """How long it has been at the same place of the same step."""
        self._silent: dict[int, float] = {}
        """How long a rank has posted nothing."""
        self._longest: dict[str, float] = {}
        """The longest time that a rank was in a place before it went on."""
        self._told: dict[int, Stall] = {}
        """What was last reported of a rank."""
        self._below: dict[int, tuple[Group, ...]] = {}
        """The latest digests, by the rank that has made them."""

    def look(
        self, posts: Mapping[int, Post], passed: float, below: Mapping[int, tuple[Group, ...]] | None = None
    ) -> list[str]:
        """Record the latest posts; return a line for each rank that goes on after it was reported.

        Args:
            posts: The latest post of each rank; ranks that are not among them any more are forgotten.
            passed: Seconds since the last call in which the observer itself was running.
            below: The latest digests of some of these ranks.
        """
        lines = []
        self._below = {rank: groups for rank, groups in (below or {}).items() if groups}
        for rank in [rank for rank in self._posts if rank not in posts]:
            for known in (self._posts, self._still, self._settled, self._silent):
                del known[rank]
        for rank, post in posts.items():
            before = self._posts.get(rank, post)
            new = rank not in self._posts
            silent = self._silent.get(rank, 0.0)
            self._silent[rank] = 0.0 if new or post.beat != before.beat else silent + passed
            has_left = new or (post.place, post.step) != (before.place, before.step)
            self._settled[rank] = 0.0 if has_left else self._settled[rank] + passed
            if new or post[1:] != before[1:] or post.has_ended:
                still = max(self._still.get(rank, 0.0), silent)
                self._longest[before.place] = max(self._longest.get(before.place, 0.0), still)
                if not new and self._told.pop(rank, None) is not None and not post.has_ended:
                    lines.append(f"Rank {rank} goes on, after {still:.0f} s in {_place_of(before)}.")
                self._still[rank] = 0.0
            else:
                self._still[rank] += passed
            self._posts[rank] = post
        return lines + self._gone_on()

    def _gone_on(self) -> list[str]:
        """Return a line for each rank that goes on after it was reported, of those that are known by digests."""
        lines: list[str] = []
        known = {rank: group for group in self._groups() for rank in group.ranks} if self._told else {}
        for rank, told in [*self._told.items()]:
            group = known.get(rank)
            if rank not in self._posts and (group is None or max(group.still, group.silent) < told.seconds):
                del self._told[rank]
                lines.append(f"Rank {rank} goes on, after {told.seconds:.0f} s or more in {_place_of(told.post)}.")
        return lines

    def _groups(self) -> list[Group]:
        """Return all ranks that are known: each one by itself, and those of digests in groups."""
        found = [
            Group((rank,), 1, post, self._settled[rank], self._still[rank], self._silent[rank])
            for rank, post in self._posts.items()
        ]
        return found + [group for rank, groups in self._below.items() if not self.is_gone(rank) for group in groups]

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank has posted nothing for some seconds, so that its digest is out of date."""
        return self._silent.get(rank, 0.0) >= GONE_S

    def digest(self) -> tuple[Group, ...]:
        """Return what is known, in as many groups as there are places where ranks are."""
        found: dict[tuple[object, ...], Group] = {}
        for group in self._groups():
            post, silent = group.post, group.silent if group.silent >= GONE_S else 0.0
            # Ranks that are silent, or outside of the trainer, are judged one by one: they need like times.
            times = (silent // GONE_S, 0.0 if post.place else group.still // GONE_S)
            place = (post.place, post.step, post.waits, post.has_ended, *times)
            found[place] = _joined(found[place], group) if place in found else group
        return tuple(found.values())

    def found(self, seconds: float) -> list[Stall]:
        """Return the ranks for which all others wait, if nothing has moved for this many seconds.

        These are the ranks whose processes do not run; if all run, those that do not wait themselves, and of these the
        ones furthest behind.
        """
        present = [group for group in self._groups() if not group.post.has_ended]
        inside = [group for group in present if group.post.place]
        if not inside or any(group.settled < seconds for group in inside):
            return []
        chosen = [group for group in present if group.silent >= seconds]
        if not chosen and any(group.still < seconds for group in inside):
            return []
        if not chosen:
            chosen = [group for group in inside if not group.post.waits]
            least = min((_far(group.post) for group in chosen), default=None)
            chosen = [group for group in chosen if _far(group.post) == least]
        if not chosen:
            chosen = [group for group in present if not group.post.place and group.still >= seconds] or inside
        found = []
        for group in chosen:
            is_silent = group.silent >= seconds
            for rank in group.ranks:
                others = group.count - len(group.ranks) if rank == group.ranks[-1] else 0
                seconds_of = group.silent if is_silent else group.still
                found.append(Stall(rank, group.post, seconds_of, is_silent, others))
        return sorted(found, key=lambda stall: stall.rank)

    def due(self, seconds: float) -> list[Stall]:
        """Return those of `found` to report now: less and less often, and not if it has taken as long before."""
        told = []
        for stall in self.found(seconds):
            usual = 0.0 if stall.is_silent else 2 * self._longest.get(stall.post.place, 0.0)
            before = self._told.get(stall.rank)
            if stall.seconds >= max(2 * before.seconds if before else 0.0, usual):
                self._told[stall.rank] = stall
                told.append(stall)
        return told

    @property
    def has_told(self) -> bool:
        """Whether a rank was reported and has not gone on."""
        return bool(self._told)

    def first_alive(self, seconds: float) -> int:
        """Return the first rank that has posted within this many seconds."""
        return min((rank for rank in self._posts if self._silent[rank] < seconds), default=-1)

    def begun_anew(self) -> Stalls:
        """Return a new object without posts that keeps the longest times of places."""
        new = Stalls()
        new._longest = self._longest
        return new

    def are_told(self, ranks: list[Stall]) -> bool:
        """Return whether all of these were reported and have not moved since."""
        return all(stall.rank in self._told for stall in ranks)


class Tree:
    """The ranks as a tree: what one of them reads of the others' reports, and what it tells about them.

    Rank 0 is at the top. A rank reads the reports of its children, and posts a digest of what it sees and of their
    digests. Where a child is gone, its own children are read instead. A rank above which all are gone does the work of
    rank 0, and reads what rank 0 would have read. So each rank reads some 64 reports in a second at most, the store
    answers for about three reports a rank, and rank 0 knows of each rank within seconds. With few ranks, all read all.

    Args:
        rank: The rank that reads.
        size: The number of all ranks.

    Attributes:
        is_deep: Whether there are ranks that rank 0 knows by digests alone.
        whole: All ranks, as seen from rank 0; only a rank that judges keeps this up to date.

    >>> tree = Tree(40, 1024)
    >>> tree.above, tree.to_read(judges=False), Tree(1, 1024).to_read(judges=False)[:4]
    ((1, 0), [1, 0], [33, 34, 35, 36])
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.is_deep: bool = size > 1 + _CHILDREN
        self.above: tuple[int, ...] = tuple(_ancestors(rank))
        self.whole: Stalls = Stalls()
        self._over = Stalls()
        """The ranks above this one."""
        self._under = Stalls()
        """The ranks below this one."""

    @property
    def is_top(self) -> bool:
        """Whether this rank does the work of rank 0; with few ranks, all do."""
        return not self.is_deep or all(self._over.is_gone(rank) for rank in self.above)

    def to_read(self, judges: bool) -> list[int]:
        """Return the ranks whose reports are to be read, each once.

        Args:
            judges: Whether this rank is to know of all ranks now.
        """
        under = self._below(self._under, self.rank) if self.is_deep and self.rank else ()
        whole = (0, *self._below(self.whole, 0)) if judges else ()
        return list(dict.fromkeys((*under, *self.above, *whole)))

    def look(self, reports: Mapping[int, Report], passed: float, judges: bool) -> list[str]:
        """Record the reports of the ranks that `to_read` has named; return lines as `Stalls.look` does."""

        def see(stalls: Stalls, ranks: Iterator[int] | Sequence[int]) -> list[str]:
            read = {rank: reports[rank] for rank in ranks if rank in reports}
            below = {rank: report.below for rank, report in read.items() if rank}
            return stalls.look({rank: report.post for rank, report in read.items()}, passed, below)

        see(self._over, self.above)
        if self.is_deep and self.rank:
            see(self._under, [*self._below(self._under, self.rank)])
        if not judges:
            self.whole = self.whole.begun_anew()
            return []
        return see(self.whole, [0, *self._below(self.whole, 0)])

    def digest(self) -> tuple[Group, ...]:
        """Return the digest of the ranks below this one; none at the top, where nobody would read it."""
        return self._under.digest() if self.is_deep and self.rank else ()

    def _below(self, stalls: Stalls, rank: int) -> Iterator[int]:
        """Yield the children of a rank, and in turn those of each child that is gone."""
        for child in range(rank * _CHILDREN + 1, min((rank + 1) * _CHILDREN + 1, self.size)):
            yield child
            if stalls.is_gone(child):
                yield from self._below(stalls, child)


def _ancestors(rank: int) -> Iterator[int]:
    while rank:
        rank = (rank - 1) // _CHILDREN
        yield rank


def _joined(one: Group, other: Group) -> Group:
    """Return two groups of ranks at the same place as one."""
    first, second = sorted((one, other), key=lambda group: group.ranks)
    ranks = tuple(sorted((*one.ranks, *other.ranks))[:_LISTED])
    least = (min(pair) for pair in zip(one[3:], other[3:], strict=True))
    return Group(ranks, first.count + second.count, first.post, *least)


def in_words(stall: Stall) -> str:
    """Describe a rank that makes no progress in a sentence."""
    post, step = stall.post, f" (step {stall.post.step})" if stall.post.step else ""
    if not stall.is_silent:
        return f"Rank {stall.rank} has been in {_place_of(post)} for {stall.seconds:.0f} s{step}."
    return (
        f"Rank {stall.rank} has posted nothing for {stall.seconds:.0f} s, and was in {_place_of(post)}{step} before: "
        "its process is stopped, swapped out, cut off or gone."
    )


def _place_of(post: Post) -> str:
    return repr(post.place) if post.place else "the program around the trainer"


def _far(post: Post) -> tuple[int, int]:
    """Return the progress of a rank, for comparison."""
    return post.step, _ORDER.get(post.place, len(_ORDER))
