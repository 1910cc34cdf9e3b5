"""What processes say to each other along the exchanges of a sum, so that it costs no round.

Two to the k processes talk to partners at distances 1, 2, 4, ...: each time everybody passes on
what it has heard so far, and twice as many know it. Others send to all at once. ``reduce.py`` adds
the gradients in the same rounds.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from helios.replicas.point_to_point import PointToPoint, Transfer


@final
class Message:
    """A row of numbers of each process for all, and a content of rank 0 for all.

    Args:
        ranks: the processes, in the group in which the message goes.
        row: what this process says; of one dimension, and as long on all processes.
        content: in rank 0 what it sends; in the others the room for it, of the same size.

    Attributes:
        rows: what each process says; whole after the last round.
        content: as given; of rank 0 after the last round.
    """

    def __init__(self, ranks: PointToPoint, row: Tensor, content: Tensor) -> None:
        self._ranks = ranks
        self.content = content
        self.rows = row.new_empty((len(ranks.others) + 1, len(row)))
        self.rows[ranks.rank] = row

    def send_over(self, distance: int) -> Transfer:
        """Begin the round with the partner at a distance, a power of two; nearest first."""
        rank = self._ranks.rank
        partner = rank ^ distance
        known, missing = (place // distance * distance for place in (rank, partner))
        sends = [(self.rows[known : known + distance], partner)]
        receives = [(self.rows[missing : missing + distance], partner)]
        if rank < distance:
            sends.append((self.content, partner))
        elif rank < 2 * distance:
            receives.append((self.content, partner))
        return self._ranks.start(sends, receives)

    def send_to_all(self) -> Transfer:
        """Begin the one round of processes whose number is no power of two."""
        ranks = self._ranks
        sends = [(self.rows[ranks.rank], other) for other in ranks.others]
        receives = [(self.rows[other], other) for other in ranks.others]
        if ranks.rank == 0:
            sends += ((self.content, other) for other in ranks.others)
        else:
            receives.append((self.content, 0))
        return ranks.start(sends, receives)
