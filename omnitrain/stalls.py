"""Ranks that make no progress: which, where and for how long, as seen from their posts.

Nothing here knows how posts are sent or what ends a run; that is in `distributed.py`. Times are the observer's own: how
long it has seen no change. Clocks of different machines are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Post", "Stall", "Stalls", "in_words"]

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


class Stall(NamedTuple):
    """A rank that makes no progress, for which others may be waiting.

    Attributes:
        rank: Its number.
        post: Its latest post.
        seconds: How long that has not changed, or how long there was no post.
        is_silent: Whether it has stopped posting: its process does not run.
    """

    rank: int
    post: Post
    seconds: float
    is_silent: bool

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
        self._told: dict[int, float] = {}
        """How long a rank had made no progress when that was last reported."""

    def look(self, posts: Mapping[int, Post], passed: float) -> list[str]:
        """Record the latest posts; return a line for each rank that goes on after it was reported.

        Args:
            posts: The latest post of each rank.
            passed: Seconds since the last call in which the observer itself was running.
        """
        lines = []
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
                if self._told.pop(rank, None) is not None and not post.has_ended:
                    lines.append(f"Rank {rank} goes on, after {still:.0f} s in {_place_of(before)}.")
                self._still[rank] = 0.0
            else:
                self._still[rank] += passed
            self._posts[rank] = post
        return lines

    def found(self, seconds: float) -> list[Stall]:
        """Return the ranks for which all others wait, if nothing has moved for this many seconds.

        These are the ranks whose processes do not run; if all run, those that do not wait themselves, and of these the
        ones furthest behind.
        """
        present = {rank: post for rank, post in self._posts.items() if not post.has_ended}
        inside = [rank for rank, post in present.items() if post.place]
        if not inside or any(self._settled[rank] < seconds for rank in inside):
            return []
        chosen = [rank for rank in present if self._silent[rank] >= seconds]
        if not chosen and any(self._still[rank] < seconds for rank in inside):
            return []
        if not chosen:
            chosen = [rank for rank in inside if not present[rank].waits]
            least = min((_far(present[rank]) for rank in chosen), default=None)
            chosen = [rank for rank in chosen if _far(present[rank]) == least]
        if not chosen:
            chosen = [rank for rank in present if rank not in inside and self._still[rank] >= seconds] or inside
        found = []
        for rank in chosen:
            is_silent = self._silent[rank] >= seconds
            found.append(Stall(rank, present[rank], (self._silent if is_silent else self._still)[rank], is_silent))
        return found

    def due(self, seconds: float) -> list[Stall]:
        """Return those of `found` to report now: less and less often, and not if it has taken as long before."""
        told = []
        for stall in self.found(seconds):
            usual = 0.0 if stall.is_silent else 2 * self._longest.get(stall.post.place, 0.0)
            if stall.seconds >= max(2 * self._told.get(stall.rank, 0.0), usual):
                self._told[stall.rank] = stall.seconds
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
