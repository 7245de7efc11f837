"""Other systems' logs, under Nereus's metric names."""
