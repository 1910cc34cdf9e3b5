"""Whether the state of a custom loader is trusted, and whether it was found to be complete."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from helios.checkpoint.record import Record
from helios.data.loader_state_check import Verdict, try_state
from helios.data.source import Source
from helios.data.stream_source import StreamSource
from helios.data.truncated import TruncatedSource

_LOGGER = logging.getLogger(__name__)
_REASON = (
    "its state does not bring back the next batch: its state_dict() must hold everything that the "
    "next batch depends on"
)


@dataclass(frozen=True)
class Claim:
    """What is known of the state of a training loader that Helios did not create.

    Attributes:
        words: components that claim that it is complete.
        missing: what a trial has found to be missing: path and reason.
    """

    words: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def determine_trust(source: Source, record: Record | None, *, can_save: bool) -> Claim:
    """Determine whether the state of the training data has to be trusted.

    It is tested once in a run, at its first start, if no loader workers are involved.

    Args:
        source: the training data, before its first pass.
        record: the checkpoint that the run resumes from.
        can_save: whether checkpoints are written.
    """
    whole = source.whole if isinstance(source, TruncatedSource) else source
    if isinstance(whole, StreamSource):
        return _judge_stream(whole, record, can_save=can_save)
    if source.claimant is None:
        return Claim()
    word, place = f"claimed by {source.claimant}", f"data: {source.claimant}"
    tried = f"{word}, tried at the first start"
    if record is not None:
        if place in record.missing:
            return Claim([], {place: record.missing[place]})
        return Claim([tried if tried in record.claims else word])
    is_here = source.description.get("num_workers", 0) == 0
    verdict = try_state(source) if is_here and can_save else Verdict.UNKNOWN
    if verdict is not Verdict.BROKEN:
        return Claim([tried if verdict is Verdict.KEPT else word])
    _LOGGER.warning(
        "The state of %s does not bring back the next batch: a copy that loaded it gave another "
        "one. A resumed run would train on other samples, so the level of this run is incomplete. "
        "Save everything that the next batch depends on in state_dict() (e.g. the content of a "
        "shuffle buffer), remove the buffer, or use a map-style data set with create_dataloader.",
        source.claimant,
    )
    return Claim([], {place: _REASON})


def _judge_stream(source: StreamSource, record: Record | None, *, can_save: bool) -> Claim:
    """Determine whether a resume uses the states of a stream's parts; otherwise it reads again.

    The states are only used if they were tested and found to be complete.
    """
    if record is not None:
        return Claim([each for each in record.claims if source.holds_states(record.data["state"])])
    if not can_save:
        return Claim()
    name = source.find_stateful()
    if name and try_state(source.for_trial()) is Verdict.KEPT:
        source.uses_state = True
        return Claim([f"claimed by {name}, tried at the first start"])
    _LOGGER.info(
        "The parts of the stream have no state that brings back the next batch, so a resume inside "
        "an epoch reads the epoch again up to its position. This changes no bit, but takes time."
    )
    return Claim()
