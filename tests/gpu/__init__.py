"""Tests that need an accelerator; skipped elsewhere."""
