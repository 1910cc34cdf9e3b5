"""The life of one call: build, load, run, tear down; and what signals do to it."""
