"""Units and losses."""
