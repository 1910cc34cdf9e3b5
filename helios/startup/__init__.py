"""How a call of the trainer starts and ends; a package for each question.

- ``options``: what was asked for? Every option is checked, and belongs to one group.
- ``checkpoint_search``: which checkpoint does the call start from, and does it fit the run?
- ``launching``: which processes carry out the call?
- ``building``: what is built for it?
- ``runs``: in which order is it set up, run and torn down?
- ``reporting``: what does the log say of it at the start?

Part of the same room as ``helios.trainer``; nothing below may import it.
"""
