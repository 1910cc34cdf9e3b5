"""What a call builds before its loop runs: owners of state, logs, checkpoints."""
