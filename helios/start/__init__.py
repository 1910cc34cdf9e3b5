"""How a call of the trainer starts and ends: which options, which checkpoint, which processes.

``docs/architecture.md`` lists the modules by question, ``docs/design.md`` their order.
This package belongs to ``helios.trainer``; lower packages must not import it.
"""
