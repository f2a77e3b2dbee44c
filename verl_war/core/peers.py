"""Which replicas a replica's text goes to. This is the one place of that decision."""

from __future__ import annotations

from collections.abc import Sequence


def peers_of(replica_ids: Sequence[str], count: int) -> dict[str, list[str]]:
    """The next ``count`` replicas of each, in a ring in the order of joining.

    Every replica sends and receives the same amount, whatever the size of the fleet, and one that joins or leaves
    changes only its neighbours. Siblings mostly sit on one replica, so that text sent further would mostly be text that
    nobody looks up.

    Args:
        replica_ids: Replicas in the order of joining, none twice.
        count: Receivers of each; all others when there are fewer.
    """
    ring = list(replica_ids)
    return {name: (ring[at + 1 :] + ring[:at])[:count] for at, name in enumerate(ring)}
