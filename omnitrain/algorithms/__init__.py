"""What changes the training itself: one file each."""
