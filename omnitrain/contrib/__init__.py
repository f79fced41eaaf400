"""Converters of other systems' files."""
