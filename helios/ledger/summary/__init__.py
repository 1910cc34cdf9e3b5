"""What a report or a comparison says of runs, and how it is written as HTML and Markdown."""
