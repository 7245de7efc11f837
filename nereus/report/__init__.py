"""What a run shows: the live display and the summary, folds of its records."""
