"""Sends a message between processes in the exchanges of a sum, without extra rounds.

2^k processes send to partners at distances 1, 2, 4, ...: each time every process passes on what it
has received so far, and twice as many know it. Otherwise each process sends to all others at once.
``tree_reducer`` adds the gradients in the same rounds.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from helios.replicas.point_to_point import PointToPoint, Transfer


@final
class Message:
    """A row of numbers from each process to all others, and bytes from rank 0 to all others.

    Args:
        ranks: the processes of the group that the message is sent in.
        row: what this process sends; 1-D, of the same length on all processes.
        content: on rank 0 what it sends; on the others the buffer for it, of the same size.

    Attributes:
        rows: what each process sends; complete after the last round.
        content: as given; that of rank 0 after the last round.
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
        """Begin the only round, for a number of processes that is not a power of two."""
        ranks = self._ranks
        sends = [(self.rows[ranks.rank], other) for other in ranks.others]
        receives = [(self.rows[other], other) for other in ranks.others]
        if ranks.rank == 0:
            sends += ((self.content, other) for other in ranks.others)
        else:
            receives.append((self.content, 0))
        return ranks.start(sends, receives)
