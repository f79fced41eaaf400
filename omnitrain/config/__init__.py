"""Configuration files: reading, checking, and building a trainer from them."""
