"""The frozen training runs of ``tests/golden/today``; as a script, it has frozen them."""

from __future__ import annotations

from tests.support.frozen import Frozen

TODAY = Frozen(
    "today",
    "e702e9a",
    {
        "one_replica": (1,),
        "by_epochs": (1,),
        "four_replicas": (2, 1, 4),
        "manual": (1,),
        "yields": (1,),
        "averaged": (1,),
        "by_rank": (4,),
        "own_loader": (2,),
        "carried": (1,),
    },
)

if __name__ == "__main__":
    TODAY.freeze_all()
