"""State of every kind in every place: what a resumed run finds of it, or what is said of it."""
