"""A run: the loop, the step, the data feed, evaluation, and the lifecycle that counts them."""
