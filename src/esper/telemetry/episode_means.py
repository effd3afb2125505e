"""Means over the episodes of an update, for sinks that know only numbers per update."""

from __future__ import annotations

from collections import defaultdict

from esper.telemetry.records import Episode


class EpisodeMeans:
    """Keeps episodes until the metrics of their update come."""

    def __init__(self) -> None:
        self._waiting: defaultdict[int, list[Episode]] = defaultdict(list)

    def add(self, episode: Episode) -> None:
        self._waiting[episode.update].append(episode)

    def drain(self, update: int) -> dict[str, float]:
        """Means by arm over the episodes of `update`; what is older is forgotten, so that nothing piles up."""
        episodes = self._waiting.pop(update, [])
        for old in [number for number in self._waiting if number < update]:
            del self._waiting[old]
        means = {}
        for arm in dict.fromkeys(episode.arm for episode in episodes):
            own = [episode for episode in episodes if episode.arm == arm]
            for field in ("episode_return", "score", "accuracy", "parameters", "length"):
                means[f"{arm}/{field}"] = sum(getattr(episode, field) for episode in own) / len(own)
        return means
