"""Training runs of commit cdb25de that fill every section of their files; see README.md."""
