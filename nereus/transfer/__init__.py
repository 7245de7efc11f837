"""Which bytes go from which slot to which, who sends them, and which slot takes which rank: pure."""
