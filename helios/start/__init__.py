"""How a call of the trainer starts and ends: which options, which checkpoint, which processes.

``docs/architecture.md`` lists the modules by question, ``docs/design.md`` the order of what they do.
This package belongs to ``helios.trainer``; lower packages must not import it.
"""
