"""The life of one call: build, load, run, tear down; and how it handles signals."""
