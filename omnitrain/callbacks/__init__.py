"""What watches a run: one file each."""
