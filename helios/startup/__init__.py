"""How a call of the trainer starts and ends; one package for each question.

- ``options``: which options are set? Each is checked, and belongs to one group.
- ``checkpoint_search``: which checkpoint does the call start from, and does it match the run?
- ``launching``: which processes run the call?
- ``building``: which objects does it need?
- ``runs``: in which order is everything set up, run and torn down?
- ``reporting``: what is logged at the start?

This package belongs to ``helios.trainer``; lower packages must not import it.
"""
