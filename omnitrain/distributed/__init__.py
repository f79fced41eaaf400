"""Communication between ranks, and processes that stop."""
