"""The frozen training runs of ``tests/golden/full_state``; as a script, it has frozen them."""

from __future__ import annotations

from tests.support.frozen import Frozen

FULL_STATE = Frozen(
    "full_state",
    "cdb25de",
    {
        "owners": (1,),
        "own_states": (1,),
        "own_places": (2,),
        "shares": (1,),
        "scaled": (1,),
        "facts": (1,),
        "history": (1,),
        "kinds": (1,),
        "windows": (2, 1),
        "sources-mixture": (2, 1),
        "sources-packed": (1,),
        "sources-read_again": (1, 2),
        "sources-stateful": (2, 1),
        "sources-steps": (1,),
        "sources-workers": (1, 2),
        "sharded-on_3": (3, 1, 2),
        "sharded-on_1": (1, 3),
        **{
            f"ledgers-{variant}_{level}": counts
            for variant, counts in {
                "v1_fp32": (1,),
                "v1_bf16": (1,),
                "v1_fp64": (1,),
                "v2_fp32": (1, 2),
                "v4_fp64": (2, 1, 3, 4),
            }.items()
            for level in ("steps", "full")
        },
    },
)

if __name__ == "__main__":
    FULL_STATE.freeze_all()
