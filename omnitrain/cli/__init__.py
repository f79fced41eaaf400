"""The command `omnitrain`."""
