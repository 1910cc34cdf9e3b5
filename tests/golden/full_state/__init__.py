"""Training runs of commit cdb25de: states by rank, ledgers, all kinds of data; see README.md."""
